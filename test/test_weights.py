"""Weights: hub names out of a sharded model, through a file, into a plain one; damage is refused."""

import os
import resource
import struct
import zlib

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import KINDS, draw_weights, join_group_of_one, make_config, make_model
from transformers import AutoModelForCausalLM

from model import ModelSettings, build, make_batch, policy_logprobs
from optim import Optimizer, OptimSettings
from weights import Segment, WeightsError, hub_layout, hub_tensors, load_into, verify_segment, write_segment

join_group_of_one()


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {kind: make_model(kind, root / kind, seed=i) for i, kind in enumerate(KINDS)}


@pytest.fixture
def segment(models, tmp_path) -> tuple[str, list[dict]]:
    path = str(tmp_path / "segment")
    table, _ = write_segment(path, hub_tensors(build(models["moe"], ModelSettings())))
    return path, table


def plain(kind: str, seed: int = 99):
    model = AutoModelForCausalLM.from_config(make_config(kind))
    draw_weights(model, seed)
    return model


def bits(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def rewritten(path: str, table: list[dict], name: str, data: bytes) -> list[dict]:
    """The file with other bytes for this tensor, and the table that a trainer would have sent for them."""
    entry = next(e for e in table if e["name"] == name)
    with open(path, "r+b") as file:
        file.seek(entry["offset"])
        file.write(data)
    return [e | {"crc32": zlib.crc32(data)} if e["name"] == name else e for e in table]


def content(path: str, table: list[dict], name: str) -> bytes:
    entry = next(e for e in table if e["name"] == name)
    with open(path, "rb") as file:
        file.seek(entry["offset"])
        return file.read(entry["bytes"])


# ---- Round trip ----


@pytest.mark.parametrize("kind", KINDS)
def test_stream_has_the_names_and_bits_of_the_files_it_was_loaded_from(models, kind):
    """Also catches a loader that puts wrong halves into a fused weight."""
    files = load_file(f"{models[kind]}/model.safetensors")
    stream = {name: tensor.clone() for name, tensor in hub_tensors(build(models[kind], ModelSettings()))}
    assert same(stream, files)


@pytest.mark.parametrize("kind", KINDS)
def test_trained_weights_arrive_bit_for_bit_in_a_plain_model(models, kind, tmp_path):
    model = build(models[kind], ModelSettings())
    rows, wanted = [torch.arange(30)], [torch.arange(30) > 0]
    logprobs, _ = policy_logprobs(model, make_batch(rows, wanted, True), 1.0, 100)
    logprobs.sum().backward()
    Optimizer(model, OptimSettings()).step(lr=0.01)
    table, size = write_segment(str(tmp_path / "segment"), hub_tensors(model))
    assert size == os.path.getsize(tmp_path / "segment")
    engine = plain(kind)
    pointers = [p.data_ptr() for p in engine.parameters()]
    assert load_into(engine, verify_segment(str(tmp_path / "segment"), table)) == len(table)
    assert [p.data_ptr() for p in engine.parameters()] == pointers  # in place
    stepped, _ = policy_logprobs(model, make_batch(rows, wanted, True), 1.0, 100)
    every = engine(rows[0][None]).logits[0].log_softmax(-1)
    assert (every[:-1].gather(1, rows[0][1:, None])[:, 0] - stepped).abs().max() < 1e-5
    assert (stepped - logprobs).abs().max() > 1e-3


def test_tied_head_is_not_sent_and_moves_with_its_embedding(models, tmp_path):
    path = str(tmp_path / "segment")
    table, _ = write_segment(path, hub_tensors(build(models["dense_tied"], ModelSettings())))
    assert "lm_head.weight" not in [e["name"] for e in table]
    engine = plain("dense_tied")
    load_into(engine, verify_segment(path, table))
    assert engine.lm_head.weight is engine.model.embed_tokens.weight


def test_each_tensor_travels_in_the_type_it_computes_in(models, tmp_path):
    path = str(tmp_path / "segment")
    model = build(models["moe"], ModelSettings(param_dtype="bfloat16"))
    table, _ = write_segment(path, hub_tensors(model))
    dtypes = {e["name"]: e["dtype"] for e in table}
    assert dtypes["model.layers.1.self_attn.q_proj.weight"] == "bf16"
    assert dtypes["model.layers.1.mlp.experts.3.up_proj.weight"] == "bf16"
    assert dtypes["model.layers.1.mlp.gate.weight"] == "f32"
    assert dtypes["lm_head.weight"] == dtypes["model.norm.weight"] == "f32"
    files = load_file(f"{models['moe']}/model.safetensors")
    for name, tensor in verify_segment(path, table).items():
        assert torch.equal(tensor, files[name].to(tensor.dtype)), name


def test_same_size_reuses_the_file_and_another_size_replaces_its_end(models, tmp_path):
    path = str(tmp_path / "segment")
    model = build(models["dense_untied"], ModelSettings())
    first, size = write_segment(path, hub_tensors(model))
    inode = os.stat(path).st_ino
    second, _ = write_segment(path, hub_tensors(model))
    assert (second, os.stat(path).st_ino, os.path.getsize(path)) == (first, inode, size)
    smaller = [("a", torch.arange(3, dtype=torch.float32))]
    table, size = write_segment(path, iter(smaller))
    assert os.path.getsize(path) == size
    assert torch.equal(verify_segment(path, table)["a"], smaller[0][1])


def test_a_file_grows_to_the_last_byte_there_is_room_for_and_one_without_room_is_named(tmp_path):
    tensors = [(f"t{i}", torch.full((1024,), float(i))) for i in range(5)]  # 4 KiB each
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)  # in place of a full disk
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5 * 4096, limits[1]))
        assert write_segment(str(tmp_path / "fits"), tensors)[1] == 5 * 4096
        resource.setrlimit(resource.RLIMIT_FSIZE, (5 * 4096 - 1, limits[1]))
        with pytest.raises(OSError, match="toolarge"):
            write_segment(str(tmp_path / "toolarge"), tensors)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_tensors_lie_at_multiples_of_64_and_do_not_overlap(segment):
    _, table = segment
    end = 0
    for entry in table:
        assert entry["offset"] % 64 == 0 and entry["offset"] >= end
        end = entry["offset"] + entry["bytes"]


def test_layout_covers_every_element_once(models):
    model = plain("moe")
    for name, pieces in hub_layout(model).items():
        numbers = torch.arange(model.state_dict()[name].numel()).view(model.state_dict()[name].shape)
        inside = torch.cat([piece.of(numbers).flatten() for piece in pieces])
        assert torch.equal(inside.sort().values, numbers.flatten()), name


# ---- Damage ----


@pytest.mark.parametrize("kind", KINDS)
def test_only_tensors_that_are_taken_apart_are_numbered_element_by_element(models, kind, monkeypatch):
    numbered = []

    def counting(count: int, *args, **kwargs):
        numbered.append(count)
        return arange(count, *args, **kwargs)

    arange = torch.arange
    monkeypatch.setattr(torch, "arange", counting)
    model = AutoModelForCausalLM.from_pretrained(models[kind])
    numbered.clear()
    layout = hub_layout(model)
    apart = {n: p for n, p in layout.items() if len(p) > 1}
    assert bool(apart) == (kind == "moe")
    sizes = {model.state_dict()[name].numel() for name in apart}
    assert set(numbered) <= sizes


def test_one_flipped_bit_is_refused_by_tensor_name_and_nothing_is_copied(segment):
    path, table = segment
    for entry in (table[0], table[len(table) // 2], table[-1]):
        with open(path, "r+b") as file:
            file.seek(entry["offset"] + entry["bytes"] - 1)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        with pytest.raises(WeightsError, match=f"Checksum of {entry['name']} "):
            verify_segment(path, table)
        with open(path, "r+b") as file:
            file.seek(entry["offset"] + entry["bytes"] - 1)
            file.write(bytes([byte]))
    verify_segment(path, table)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda t: t.pop("model.layers.2.mlp.experts.7.down_proj.weight"),
            "experts.7.down_proj.weight was not sent",
        ),
        (lambda t: t.update({"model.extra.weight": torch.zeros(1)}), "model.extra.weight was sent but"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(65)}),
            r"model.norm.weight was sent as \[65\], want \[64\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int32)}),
            "model.norm.weight was sent as",
        ),
        (lambda t: t.clear(), "model.embed_tokens.weight was not sent"),
    ],
)
def test_a_set_of_tensors_that_is_not_the_model_is_refused_before_the_first_copy(segment, damage, message):
    tensors = verify_segment(*segment)
    damage(tensors)
    engine = plain("moe")
    before = bits(engine)
    with pytest.raises(WeightsError, match=message):
        load_into(engine, tensors)
    assert same(bits(engine), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "f16"}, "unknown dtype"),
        ({"bytes": 4}, ", shape "),
        ({"shape": [64, 65]}, ", shape "),
        ({"offset": 1}, "does not fit"),
        ({"offset": 64 * 10**6}, "does not fit"),
        ({"offset": -64}, "does not fit"),
        ({"name": "model.norm.weight"}, "twice"),
    ],
)
def test_a_table_that_cannot_be_is_refused(segment, change, message):
    path, table = segment
    assert table[-1]["name"] != "model.norm.weight" and any(e["name"] == "model.norm.weight" for e in table)
    with pytest.raises(WeightsError, match=message):
        verify_segment(path, [*table[:-1], table[-1] | change])


def test_a_short_missing_or_empty_file_is_refused(segment, tmp_path):
    path, table = segment
    with pytest.raises(WeightsError, match="Cannot map"):
        verify_segment(str(tmp_path / "none"), table)
    with pytest.raises(WeightsError, match="empty"):
        verify_segment(path, [])
    os.truncate(path, os.path.getsize(path) - 64)
    with pytest.raises(WeightsError, match="does not fit"):
        verify_segment(path, table)
    os.truncate(path, 0)
    with pytest.raises(WeightsError, match="Cannot map"):
        verify_segment(path, table)


def test_a_file_that_is_written_after_it_was_verified_is_told_from_one_that_is_not(tmp_path):
    """However soon it is written, whoever writes it, and though the bytes are the same."""
    path = str(tmp_path / "segment")
    tensors = [("a", torch.arange(5000.0)), ("b", torch.ones(7))]
    for _ in range(20):
        table, _ = write_segment(path, iter(tensors))
        segment, found = Segment.verify(path, table)
        with open(path, "r+b", buffering=0) as file:
            file.write(b"x")
        with pytest.raises(WeightsError, match="was written after"):
            segment.check()
        table, _ = write_segment(path, iter(tensors))
        segment, found = Segment.verify(path, table)
        segment.check()
        assert torch.equal(found["a"], tensors[0][1])
        write_segment(path, iter(tensors))
        with pytest.raises(WeightsError, match="was written after"):
            segment.check()
    segment, _ = Segment.verify(path, write_segment(path, iter(tensors))[0])
    os.unlink(path)
    with pytest.raises(WeightsError, match="Cannot read"):
        segment.check()


def test_swapped_rows_pass_the_checksum_and_show_in_logprobs(models, segment):
    """Why an engine's `score` is compared as well (SkyRL #1737)."""
    path, table = segment
    for expert in range(8):  # all, since a short text may not reach one of them
        gate, up = (f"model.layers.1.mlp.experts.{expert}.{name}_proj.weight" for name in ("gate", "up"))
        data = {name: content(path, table, name) for name in (gate, up)}
        for name, other in ((gate, up), (up, gate)):
            table = rewritten(path, table, name, data[other])
    engine, right = plain("moe"), AutoModelForCausalLM.from_pretrained(models["moe"])
    load_into(engine, verify_segment(path, table))
    ids = torch.arange(40)[None]
    assert (engine(ids).logits.log_softmax(-1) - right(ids).logits.log_softmax(-1)).abs().max() > 1e-2


def test_values_are_little_endian(tmp_path):
    path = str(tmp_path / "segment")
    table, _ = write_segment(path, iter([("x", torch.tensor(1.5))]))
    assert content(path, table, "x") == struct.pack("<f", 1.5) and table[0]["shape"] == []
    assert verify_segment(path, table)["x"].item() == 1.5
