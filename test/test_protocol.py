"""The wire, from Python: the same golden and malformed messages that test/protocol.test.ts reads."""

import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest

import protocol
from wire_python import WIRE, reencode, unframe_parts

GOLDENS = json.loads((WIRE / "golden.json").read_text())
MALFORMED = json.loads((WIRE / "malformed.json").read_text())
names = lambda entry: entry["file"]  # noqa: E731


def read(path: Path) -> list[bytes]:
    return unframe_parts(path.read_bytes())


def same_floats(spec, expected, got) -> bool:
    """Equal, and floats where the table says float although 1.0 travels as the integer 1."""
    if isinstance(spec, dict) and "?" in spec:
        return got is None if expected is None else same_floats(spec["?"], expected, got)
    if isinstance(spec, dict):
        specs = {key: spec.get("*", spec.get(key)) for key in expected}
        return expected.keys() == got.keys() and all(
            same_floats(specs[key], expected[key], got[key]) for key in got
        )
    if isinstance(spec, list):
        return len(expected) == len(got) and all(map(lambda e, g: same_floats(spec[0], e, g), expected, got))
    if spec.startswith(("int", "float")) and got is not None and type(got).__name__ != spec.rstrip("?"):
        return False
    return expected == got


@pytest.mark.parametrize("golden", GOLDENS, ids=names)
def test_golden_decodes_to_what_golden_json_says(golden):
    message = protocol.decode(read(WIRE / golden["file"]), lambda re: golden["answers"])
    for key in ("kind", "seq", "id", "re", "deadline_ms"):
        assert getattr(message, key) == golden[key]
    part = protocol.part_of(message.kind, golden["answers"])
    assert same_floats(part["fields"], golden["fields"], message.fields)
    assert message.frames.keys() == golden["frames"].keys()
    for key, array in message.frames.items():
        dtype = protocol.DTYPES[part["frames"][key].rstrip("?")]
        assert array.dtype == dtype and array.ndim == 1 and not array.flags.writeable
        np.testing.assert_array_equal(
            array, np.array([as_number(text) for text in golden["frames"][key]], dtype)
        )


def as_number(text: str) -> float:
    return float(text.replace("Infinity", "inf")) if not text.lstrip("-").isdigit() else int(text)


def test_every_golden_is_listed():
    assert sorted(path.name for path in WIRE.glob("*.bin")) == sorted(map(names, GOLDENS))


@pytest.mark.parametrize("golden", GOLDENS, ids=names)
def test_golden_survives_encoding_and_decoding_in_python(golden):
    answers = lambda re: golden["answers"]  # noqa: E731
    before = protocol.decode(read(WIRE / golden["file"]), answers)
    after = protocol.decode(unframe_parts(reencode(golden)), answers)
    assert after.fields == before.fields
    for key, array in before.frames.items():
        np.testing.assert_array_equal(after.frames[key], array)


@pytest.mark.parametrize("entry", [entry for entry in MALFORMED if entry["refused"]], ids=names)
def test_malformed_is_refused_and_the_field_is_named(entry):
    with pytest.raises(protocol.ProtocolError) as caught:
        protocol.decode(read(WIRE / "malformed" / entry["file"]), lambda re: entry["answers"])
    assert caught.value.field == entry["field"]


@pytest.mark.parametrize("entry", [entry for entry in MALFORMED if not entry["refused"]], ids=names)
def test_near_miss_is_accepted(entry):
    assert protocol.decode(read(WIRE / "malformed" / entry["file"])).kind


def test_other_version_names_both_versions():
    with pytest.raises(protocol.ProtocolError, match="Protocol version 3, this side speaks 2"):
        protocol.decode(read(WIRE / "malformed" / "other-version.bin"))


def heartbeat(**stats):
    return protocol.encode("heartbeat", 0, {"received": 0, "stats": stats})


@pytest.mark.parametrize("value", [True, math.nan, math.inf, "1", None, np.float32(1)])
def test_encode_refuses_what_is_not_a_finite_number(value):
    with pytest.raises(protocol.ProtocolError) as caught:
        heartbeat(loss=value)
    assert caught.value.field == "heartbeat.stats.loss"


@pytest.mark.parametrize("value", [True, 1.5, 2**53, -(2**53), np.int64(1)])
def test_encode_refuses_what_is_not_an_integer_within_2_53(value):
    with pytest.raises(protocol.ProtocolError) as caught:
        protocol.encode("heartbeat", 0, {"received": value, "stats": {}})
    assert caught.value.field == "heartbeat.received"


def test_encode_refuses_foreign_objects_in_json():
    for value in ({1: "a"}, {"a": b"bytes"}, {"a": {1, 2}}, {"a": math.nan}):
        with pytest.raises(protocol.ProtocolError):
            protocol.encode("ready", 0, {"info": value})


def test_encode_refuses_frames_of_another_type():
    good = {"ids": np.array([1], np.int32), "lengths": np.array([1], np.int32)}
    for key, bad in {"ids": np.array([1]), "lengths": np.zeros((1, 1), np.int32)}.items():
        with pytest.raises(protocol.ProtocolError) as caught:
            protocol.encode("score", 0, {}, {**good, key: bad}, id=1)
        assert caught.value.field == key
    with pytest.raises(protocol.ProtocolError, match=r"Missing frame score\.lengths"):
        protocol.encode("score", 0, {}, {"ids": good["ids"]}, id=1)


def test_encode_copies_strided_frames():
    ids = np.arange(6, dtype=np.int32)[::2]
    message = protocol.decode(protocol.encode("score", 0, {}, {"ids": ids, "lengths": ids[:1]}, id=1))
    np.testing.assert_array_equal(message.frames["ids"], [0, 2, 4])


def test_message_over_64_mib_is_refused_both_ways():
    big = np.zeros(protocol.MAX_MESSAGE_BYTES // 4, np.int32)
    with pytest.raises(protocol.ProtocolError, match="at most"):
        protocol.encode("score", 0, {}, {"ids": big, "lengths": big[:1]}, id=1)
    with pytest.raises(protocol.ProtocolError, match="at most"):
        protocol.decode([b"", big.tobytes() + b"\0"])


def test_text_that_is_not_unicode_is_an_error_of_the_sender():
    with pytest.raises(protocol.ProtocolError, match="Cannot send refused"):
        protocol.encode("refused", 0, {"reason": "\ud800"})


def test_parts_are_framed_by_their_length():
    assert unframe_parts(struct.pack("<I", 1) + b"a" + struct.pack("<I", 0)) == [b"a", b""]


def test_messages_back_to_back_come_apart_one_by_one():
    ids = np.arange(3, dtype=np.int32)
    score = protocol.encode("score", 4, {}, {"ids": ids, "lengths": ids[:1]}, id=1)
    ping = protocol.encode("ping", 5, {}, id=2)
    both = protocol.decode_all([*score, *ping, *score], lambda re: None)
    assert [(message.kind, message.seq) for message in both] == [("score", 4), ("ping", 5), ("score", 4)]
    assert both[2].frames["ids"].tolist() == [0, 1, 2]
    opened = protocol.open_messages([*ping, b"\xc1", *ping])
    assert next(opened).kind == "ping"
    with pytest.raises(protocol.ProtocolError):
        next(opened)
