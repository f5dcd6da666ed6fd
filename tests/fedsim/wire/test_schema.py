"""Optional parts, elastic and stored fields, full precisions: what a schema may say beyond fixed tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, make_dataclass, replace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from fedsim.errors import UsageError, WireError
from fedsim.experiment import Experiment, build_algorithm
from fedsim.learning.gaussian import packed
from fedsim.problem import Problem
from fedsim.wire.codecs import raw_bytes
from fedsim.wire.envelope import (
    VERSION,
    Envelope,
    FieldHeader,
    Header,
    PartHeader,
    decode,
    decode_own,
    digest,
    encode,
    pack,
    unpack,
)
from fedsim.wire.schema import (
    TRIANGLE,
    FullPrecision,
    Inputs,
    Least,
    Logits,
    Mean,
    Norm,
    Owners,
    Scalar,
    Shift,
    Weights,
    all_fields,
    check_values,
    optional_group,
    scalars_of,
    schema,
    values_of,
)
from protocols.fedlap_func import FedLapFunc

fixed = settings(deadline=None, derandomize=True, database=None, max_examples=60)
DIMS = {"P": 4, TRIANGLE: 10, "C": 3, "I": 5, "M": 7}


@dataclass(frozen=True)
class Extra:
    shift: Shift
    logits: Logits
    loss: Scalar


@dataclass(frozen=True)
class Carrier:
    mean: Mean
    extra: Extra | None = None


@dataclass(frozen=True)
class NewMemory:
    inputs: Inputs
    weights: Weights
    owners: Owners


@dataclass(frozen=True)
class Teller:
    mean: Mean
    news: NewMemory | None = None


@dataclass(frozen=True)
class Matrix:
    precision: FullPrecision


def frames_of(envelope: Envelope) -> list[bytes]:
    return [envelope.head, *(bytes(memoryview(f)) for f in envelope.frames)]


def sent(message: object, codecs: Mapping[str, str] | None = None) -> Envelope:
    payload = encode(message, codecs or {}, DIMS)
    return pack(Header(VERSION, "task", "run", fields=payload.fields), payload.frames)


def received(kind: type[Any], envelope: Envelope, codecs: Mapping[str, str] | None = None) -> Any:
    return decode(kind, unpack(frames_of(envelope), "here"), codecs or {}, DIMS, "here")


def extra(rows: int = 2) -> Extra:
    return Extra(torch.arange(4.0), torch.arange(3.0 * rows).reshape(rows, 3), 2.5)


def news(rows: int, *, stored: torch.dtype = torch.uint8) -> NewMemory:
    inputs = torch.arange(5 * rows).reshape(rows, 5).to(stored)
    return NewMemory(inputs, torch.arange(float(rows)) + 0.5, torch.arange(rows) * 2**40 + 1)


# ---- optional parts


def test_a_part_is_behind_the_fields_that_every_letter_carries() -> None:
    part = optional_group(Carrier)
    assert part is not None and (part.name, part.message) == ("extra", Extra)
    assert [f.name for f in schema(Carrier)] == ["mean"]
    assert [f.name for f in all_fields(Carrier)] == ["mean", "shift", "logits", "loss"]
    assert optional_group(Extra) is None
    assert [f.name for f, _ in values_of(Carrier(torch.ones(4)))] == ["mean"]
    with_part = values_of(Carrier(torch.ones(4), extra()))
    assert [f.name for f, _ in with_part] == ["mean", "shift", "logits", "loss"]


def test_a_message_without_its_part_comes_back_without_it() -> None:
    envelope = sent(Carrier(torch.arange(4.0)))
    assert [f.name for f in envelope.header.fields] == ["mean"]
    back = received(Carrier, envelope)
    assert back.extra is None
    assert back.mean.tolist() == [0, 1, 2, 3]


@fixed
@given(st.integers(0, 7), st.lists(st.floats(width=32, allow_nan=False), min_size=4, max_size=4))
def test_a_message_with_its_part_comes_back_bit_for_bit(rows: int, values: list[float]) -> None:
    part = replace(extra(rows), shift=torch.tensor(values))
    back = received(Carrier, sent(Carrier(torch.ones(4), part)))
    assert isinstance(back.extra, Extra)
    for f, value in values_of(part):
        got = getattr(back.extra, f.name)
        if isinstance(value, Tensor):
            assert (got.shape, got.dtype) == (value.shape, value.dtype)
            assert bytes(raw_bytes(got)) == bytes(raw_bytes(value))
        else:
            assert got == value
    assert decode_own(Carrier, encode(back, {}, DIMS), {}, DIMS).extra is not None


def test_a_part_encoded_apart_is_the_same_letter() -> None:
    """The common part of a broadcast is encoded once, and what only one client gets is put behind it."""
    whole = encode(Carrier(torch.ones(4), extra()), {}, DIMS)
    common, own = encode(Carrier(torch.ones(4)), {}, DIMS), encode(extra(), {}, DIMS)
    assert whole.fields == common.fields + own.fields
    assert [bytes(f) for f in whole.frames] == [bytes(f) for f in common.frames + own.frames]


@dataclass(frozen=True)
class Two:
    mean: Mean
    extra: Extra | None = None
    news: NewMemory | None = None


@dataclass(frozen=True)
class Shared:
    shift: Shift
    extra: Extra | None = None


@dataclass(frozen=True)
class Either:
    mean: Mean
    extra: Extra | NewMemory | None = None


@dataclass(frozen=True)
class Optional:
    mean: Mean | None = None


def test_two_parts_are_refused() -> None:
    for read in (schema, optional_group, all_fields):
        with pytest.raises(UsageError, match="Two has 2 optional parts; it may have one"):
            read(Two)


def test_a_field_name_in_message_and_part_is_refused() -> None:
    with pytest.raises(UsageError, match="Shared and its optional part share a field name"):
        schema(Shared)


@pytest.mark.parametrize("kind", [Either, Optional])
def test_an_optional_field_that_is_no_message_is_refused(kind: type[Any]) -> None:
    with pytest.raises(UsageError, match="must be annotated with a kind"):
        schema(kind)


WHOLE = sent(Carrier(torch.ones(4), extra()))


@pytest.mark.parametrize(
    "keep",
    [[0, 2, 1, 3], [1, 2, 3, 0], [0, 1, 2], [0, 1], [0, 3], [1, 2, 3], [0, 1, 2, 3, 3], [0, 0], []],
    ids=str,
)
def test_a_part_in_another_order_or_incomplete_is_refused(keep: list[int]) -> None:
    described, frames = WHOLE.header.fields, WHOLE.frames
    header = msgspec.structs.replace(WHOLE.header, fields=tuple(described[i] for i in keep))
    with pytest.raises(WireError, match=r"^here: (fields .* where Carrier has|.* have the same name)"):
        received(Carrier, pack(header, [frames[i] for i in keep]))
    received(Carrier, WHOLE)


def test_a_part_of_another_message_is_refused() -> None:
    with pytest.raises(WireError, match=r"^here: fields .* where Carrier has"):
        received(Carrier, sent(Teller(torch.ones(4), news(2))))
    with pytest.raises(WireError, match=r"^here: fields .* where Extra has"):
        received(Extra, WHOLE)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_check_values_looks_into_the_part(bad: float) -> None:
    check_values(Carrier(torch.ones(4), extra()), "here")
    rejected = torch.ones(4)
    rejected[2] = bad
    with pytest.raises(WireError, match=r"^here: field 'shift' has 1 of 4 values NaN or Inf"):
        check_values(Carrier(torch.ones(4), replace(extra(), shift=rejected)), "here")
    with pytest.raises(WireError, match=f"^here: field 'loss' is {bad}"):
        check_values(Carrier(torch.ones(4), replace(extra(), loss=bad)), "here")


# ---- elastic fields


@pytest.mark.parametrize("rows", [0, 1, 6, 7])
def test_an_elastic_first_size_may_be_anything_up_to_its_bound(rows: int) -> None:
    back = received(Teller, sent(Teller(torch.ones(4), news(rows)))).news
    assert [tuple(t.shape) for t in (back.inputs, back.weights, back.owners)] == [(rows, 5), (rows,), (rows,)]
    assert torch.equal(back.inputs, news(rows).inputs)
    assert torch.equal(back.weights, news(rows).weights)
    assert torch.equal(back.owners, news(rows).owners)


@pytest.mark.parametrize("shape", [(8, 3), (2, 2), (2, 4), (2, 0), (6,), (2, 3, 1), ()], ids=str)
def test_another_shape_is_refused_on_both_sides(shape: tuple[int, ...]) -> None:
    logits = torch.zeros(shape)
    part = replace(extra(), logits=logits)
    for message in (part, Carrier(torch.ones(4), part)):
        with pytest.raises(WireError, match=r"\.logits has shape .*its kind 'logits' says \(7, 3\)"):
            encode(message, {}, DIMS)
    data = raw_bytes(logits)
    described = list(WHOLE.header.fields)
    parts = (PartHeader("values", data.nbytes, digest(data)),)
    described[2] = FieldHeader("logits", "dense", "f32", shape, parts)
    frames = [*WHOLE.frames[:2], data, WHOLE.frames[3]]
    header = msgspec.structs.replace(WHOLE.header, fields=tuple(described))
    with pytest.raises(WireError, match=r"^here: field 'logits' has shape .* the model's layout says"):
        received(Carrier, pack(header, frames))


def test_rows_of_one_part_belong_together() -> None:
    lame = replace(news(3), weights=torch.ones(2))
    with pytest.raises(WireError, match="2 rows of 'weights' where 'inputs' has 3"):
        received(Teller, sent(Teller(torch.ones(4), lame)))


@pytest.mark.parametrize("rows", [0, 1, 3, 7])
def test_an_announced_number_of_rows_that_the_frame_has_not_is_refused(rows: int) -> None:
    described = list(WHOLE.header.fields)
    described[2] = msgspec.structs.replace(described[2], shape=(rows, 3))
    header = msgspec.structs.replace(WHOLE.header, fields=tuple(described))
    with pytest.raises(WireError, match=f"24 bytes of values where the layout demands {12 * rows}"):
        received(Carrier, pack(header, WHOLE.frames))


# ---- stored inputs, owners


@pytest.mark.parametrize("stored", [torch.uint8, torch.float32])
def test_stored_inputs_keep_their_type_and_owners_are_integers(stored: torch.dtype) -> None:
    envelope = sent(Teller(torch.ones(4), news(3, stored=stored)))
    back = received(Teller, envelope).news
    assert back.inputs.dtype == stored
    assert torch.equal(back.inputs, news(3, stored=stored).inputs)
    assert back.owners.dtype == torch.int64
    assert back.owners.tolist() == [1, 2**40 + 1, 2**41 + 1]  # float32 could not say this
    assert {f.name: f.dtype for f in envelope.header.fields} == {
        "mean": "f32",
        "inputs": "u8" if stored == torch.uint8 else "f32",
        "weights": "f32",
        "owners": "i64",
    }
    assert memoryview(envelope.frames[1]).nbytes == 15 * stored.itemsize
    assert memoryview(envelope.frames[3]).nbytes == 24


def test_only_stored_fields_may_be_bytes() -> None:
    envelope = sent(Teller(torch.ones(4), news(3)))
    described, frames = list(envelope.header.fields), list(envelope.frames)
    frames[2] = bytes(3)
    parts = (PartHeader("values", 3, digest(frames[2])),)
    described[2] = FieldHeader("weights", "dense", "u8", (3,), parts)
    header = msgspec.structs.replace(envelope.header, fields=tuple(described))
    with pytest.raises(WireError, match="'weights' has dtype 'u8'"):
        received(Teller, pack(header, frames))
    described[2] = envelope.header.fields[2]
    described[1] = msgspec.structs.replace(envelope.header.fields[1], dtype="f64")
    header = msgspec.structs.replace(envelope.header, fields=tuple(described))
    with pytest.raises(WireError, match="'inputs' has dtype 'f64'"):
        received(Teller, pack(header, envelope.frames))


# ---- full precisions


def matrix(lowest: float) -> Tensor:
    """Symmetric (4, 4) with eigenvalues `lowest`, 1, 2, 3."""
    draws = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(4, 4, generator=draws, dtype=torch.float64))
    return basis @ torch.diag(torch.tensor([lowest, 1.0, 2.0, 3.0], dtype=torch.float64)) @ basis.mT


def test_a_full_precision_must_be_positive_definite() -> None:
    good = received(Matrix, sent(Matrix(packed(matrix(0.01)))))
    check_values(good, "here")
    for lowest in (-0.01, -5.0):
        with pytest.raises(WireError, match=r"^here: precision 'precision' is not positive definite"):
            check_values(received(Matrix, sent(Matrix(packed(matrix(lowest))))), "here")
    with pytest.raises(WireError, match="not positive definite"):
        check_values(Matrix(torch.zeros(10)), "here")


# ---- codecs of a run


def built(algorithm: type[Any], codecs: Mapping[str, str], **settings: Any) -> Problem:
    experiment = Experiment(
        algo=algorithm.name, model="logistic", clients=3, hyperparameters=settings, codecs=codecs
    )
    return Problem.build(experiment, build_algorithm(algorithm, settings), None)


def test_a_codec_can_be_chosen_for_a_field_of_a_part() -> None:
    codecs = {"logits": "bf16"}
    value = torch.full((2, 3), 1 / 3)
    message = Carrier(torch.ones(4), replace(extra(), logits=value))
    back = received(Carrier, sent(message, codecs), codecs)
    assert torch.equal(back.extra.logits, value.bfloat16().float())
    assert torch.equal(back.extra.shift, extra().shift)
    with pytest.raises(WireError, match="'logits' is encoded as 'bf16'; this run uses 'dense'"):
        received(Carrier, sent(message, codecs))
    both = built(FedLapFunc, {"weights": "f16"}).messages.codecs
    assert both == {"down": {"weights": "f16"}, "up": {"weights": "f16"}}
    only_down = built(FedLapFunc, {"down.weights": "bf16"}).messages.codecs
    assert only_down == {"down": {"weights": "bf16"}, "up": {}}


# ---- groups of diagnostics


@dataclass(frozen=True)
class Diagnostics:
    loss: Scalar
    slack: Least


@dataclass(frozen=True)
class Reported:
    mean: Mean
    info: Diagnostics


def test_a_group_crosses_the_wire_as_one_vector() -> None:
    message = Reported(torch.ones(3), Diagnostics(0.25, -1e300))
    payload = encode(message, {}, {"P": 3})
    described = [(f.name, f.dtype, f.shape) for f in payload.fields]
    assert described == [("mean", "f32", (3,)), ("info", "f64", (2,))]
    received = decode_own(Reported, payload, {}, {"P": 3})
    assert received.info == message.info
    assert [(f.name, group) for f, group in scalars_of(Reported)] == [("loss", "info"), ("slack", "info")]


def test_a_number_of_a_group_that_is_not_finite_is_refused_by_name() -> None:
    with pytest.raises(WireError, match="field 'slack' is nan"):
        check_values(Reported(torch.ones(3), Diagnostics(0.0, float("nan"))), "here")


def test_a_group_of_another_length_is_refused() -> None:
    payload = encode(Reported(torch.ones(3), Diagnostics(1.0, 2.0)), {}, {"P": 3})

    @dataclass(frozen=True)
    class Longer:
        loss: Scalar
        slack: Least
        norm: Norm

    longer = make_dataclass("Reported", [("mean", Mean), ("info", Longer)], frozen=True)
    with pytest.raises(WireError, match="field 'info' has shape"):
        decode_own(longer, payload, {}, {"P": 3})


def test_a_group_holds_numbers_only() -> None:
    @dataclass(frozen=True)
    class Mixed:
        loss: Scalar
        mean: Mean

    with pytest.raises(UsageError, match="Mixed is a group of diagnostics"):
        schema(make_dataclass("Message", [("info", Mixed)], frozen=True))
