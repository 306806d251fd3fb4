/**
 * Write the generated tables of README.md anew:   npx tsx scripts/readme_tables.ts
 *
 * The tables of options and metrics come from config.ts and metrics.ts, so that the README cannot drift from the code;
 * test/readme.test.ts fails when they differ.
 */
import { readFileSync, realpathSync, writeFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { optionsTable } from '../molt/config.ts';
import { metricsTable } from '../molt/metrics.ts';

/** The README with its generated parts made anew. Throws when a marker is missing. */
export function withTables(readme: string): string {
  let out = readme;
  for (const [name, table] of Object.entries({ options: optionsTable(), metrics: metricsTable() })) {
    const part = new RegExp(`(<!-- ${name} -->\n)[\\s\\S]*?(\n<!-- /${name} -->)`);
    if (!part.test(out)) throw new Error(`README.md has no <!-- ${name} --> ... <!-- /${name} -->`);
    out = out.replace(part, (_, before: string, after: string) => `${before}${table}${after}`);
  }
  return out;
}

if (process.argv[1] && realpathSync(process.argv[1]) === fileURLToPath(import.meta.url)) {
  writeFileSync('README.md', withTables(readFileSync('README.md', 'utf8')));
}
