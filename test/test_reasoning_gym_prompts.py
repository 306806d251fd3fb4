"""scripts/reasoning_gym_prompts.py as molt runs it. Most tests need the package, installed by hand."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "reasoning_gym_prompts.py"
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None,
    reason="reasoning-gym is not installed (.venv/bin/python -m pip install reasoning-gym==0.1.25)",
)


def run(*words: str, path: str | None = None, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    if path:
        env["PYTHONPATH"] = path
    command = [sys.executable, SCRIPT, *words]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


def prompts(*words: str, hash_seed: str = "0") -> list[dict]:
    done = run(*words, hash_seed=hash_seed)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def inputs(*words: str) -> list[str]:
    return [prompt["input"] for prompt in prompts(*words)]


def test_without_the_package_it_says_how_to_install_it(tmp_path):
    (tmp_path / "reasoning_gym.py").write_text("raise ModuleNotFoundError('no', name='reasoning_gym')")
    done = run("--task", "chain_sum", "--split", "train", "--seed", "1", path=str(tmp_path))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("reasoning-gym is missing; install it: ")
    assert done.stderr.endswith("python -m pip install reasoning-gym==0.1.25\n")
    assert done.stderr.count("\n") == 1


@needs_package
def test_prompts_are_distinct_and_the_same_for_the_same_seed():
    words = ["--task", "chain_sum", "--size", "300", "--split", "train", "--seed"]
    first = prompts(*words, "7")
    assert len({prompt["input"] for prompt in first}) == 300
    assert set(first[0]) == {"input", "label"}
    assert prompts(*words, "7", hash_seed="5") == first
    other = prompts(*words, "8")
    assert len({p["input"] for p in first} & {p["input"] for p in other}) < 150  # some are short


@needs_package
def test_no_question_is_trained_and_held_out_even_in_a_small_task():
    small = ["--task", "chain_sum", "--config", '{"max_terms": 2, "max_digits": 1}']
    held = inputs(*small, "--split", "heldout", "--seed", "1")
    trained = inputs(*small, "--split", "train", "--seed", "1")
    assert not set(held) & set(trained)
    assert len(held) + len(trained) == 200  # a + b and a - b of one digit: all there are
    assert inputs(*small, "--split", "heldout", "--seed", "2") == held


@needs_package
def test_a_task_that_has_not_enough_says_so_and_several_tasks_come_one_after_the_other():
    tasks = ["--task", "chain_sum", "--task", "leg_counting", "--heldout-size", "5"]
    done = run(*tasks, "--split", "heldout", "--seed", "1")
    assert len(done.stdout.splitlines()) == 10
    small = ["--task", "chain_sum", "--config", '{"max_terms": 2, "max_digits": 1}']
    assert "chain_sum has no more than" in run(*small, "--split", "train", "--seed", "1").stderr


@needs_package
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--task", "chain_sun"], "no task chain_sun; did you mean chain_sum"),
        (["--task", "chain_sum", "--config", '{"max_terms": 1}'], "chain_sum refuses --config"),
        (["--task", "chain_sum", "--config", '{"colour": 1}'], "chain_sum refuses --config"),
        (["--task", "chain_sum", "--size", "0"], "must be at least 1, got 0"),
    ],
)
def test_what_it_cannot_do_is_one_line_and_no_success(words, said):
    done = run(*words, "--split", "train", "--seed", "1")
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
