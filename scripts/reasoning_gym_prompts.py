"""Prompts of reasoning-gym, as a source of data.prompt_dataset and eval.dataset:

    --data.prompt_dataset "scripts/reasoning_gym_prompts.py --task chain_sum --size 2000"
    --eval.dataset        "scripts/reasoning_gym_prompts.py --task chain_sum"

prints {"input": question, "label": answer} a line. `--task` may be given several times, `--config` holds
settings of the tasks as JSON. molt/sources.ts adds `--split train|heldout --seed N`. The package is
installed by hand:

    .venv/bin/python -m pip install reasoning-gym==0.1.25

Decisions
  1. Which split a question is of is decided by a hash of its text, so no question is in both, whatever the
     seeds and however small the task. Other seeds would not do: item i of seed s is item i - 1 of seed s + 1.
  2. A question is printed once. A task that has fewer than asked for says so.
  3. The held-out prompts do not depend on the seed, so that scores of several runs compare.
Not here: the package's own judges (`score_answer`). The label is one right answer; some tasks have several.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import importlib
import json
import os
import random
import sys
from collections.abc import Iterator

HELD_OUT_SHARE = 5  # one question in this many is held out
DRAWS = 20  # per prompt that is wanted; a task that has not given enough by then has no more to give


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints prompts of reasoning-gym, one JSON object a line.")
    parser.add_argument("--task", action="append", required=True, help="name of a task; again for more")
    parser.add_argument("--size", type=int, default=2000, help="training prompts of each task")
    parser.add_argument("--heldout-size", type=int, default=400, help="held-out prompts of each task")
    parser.add_argument("--config", type=json.loads, default={}, help="settings of the tasks, a JSON object")
    parser.add_argument("--split", choices=["train", "heldout"], required=True)
    parser.add_argument("--seed", type=int, required=True)
    args = parser.parse_args()
    size = args.size if args.split == "train" else args.heldout_size
    if size < 1:
        sys.exit(f"{args.split} prompts: must be at least 1, got {size}")
    gym = load_package()
    for task in args.task:
        prompts = list(distinct(gym, task, args.config, args.split, args.seed, size))
        for question, answer in prompts:
            print(json.dumps({"input": question, "label": answer}, ensure_ascii=False))
        if len(prompts) < size:
            shortage = f"{task} has no more than {len(prompts)} {args.split} prompts, wanted {size}"
            print(shortage, file=sys.stderr)


def load_package():
    try:
        return importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        if error.name != "reasoning_gym":
            raise
        python = os.path.relpath(sys.executable) if sys.executable.startswith(os.getcwd()) else sys.executable
        sys.exit(f"reasoning-gym is missing; install it: {python} -m pip install reasoning-gym==0.1.25")


def distinct(gym, task: str, config: dict, split: str, seed: int, size: int) -> Iterator[tuple[str, str]]:
    """Up to `size` different questions of the split, with their answers."""
    names = gym.factory.DATASETS
    if task not in names:
        near = difflib.get_close_matches(task, names, n=3, cutoff=0)
        sys.exit(f"no task {task}; did you mean {', '.join(near)}?")
    # Neighbouring seeds share all but one of their items, so the seed is a hash of the seed.
    start = int.from_bytes(digest(f"{task} {split} {seed if split == 'train' else 0}")[:4], "little")
    random.seed(start)  # for tasks that draw from the global generator
    draws = DRAWS * size + 1000
    try:
        items = gym.create_dataset(task, size=draws, seed=start, **config)
    except (AssertionError, TypeError, ValueError) as error:
        sys.exit(f"{task} refuses --config {json.dumps(config)}: {error}")
    seen: set[str] = set()
    for i in range(draws):
        if len(seen) == size:
            return
        item = items[i]
        question = item["question"]
        if question in seen or split_of(question) != split:
            continue
        seen.add(question)
        yield question, item["answer"]


def split_of(question: str) -> str:
    return "heldout" if digest(question)[0] % HELD_OUT_SHARE == 0 else "train"


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


if __name__ == "__main__":
    main()
