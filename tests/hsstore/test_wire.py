from __future__ import annotations

import contextlib

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from hsstore import gather, wire
from hsstore.errors import DamagedError, ServiceError, UsageError
from hsstore.plan import Plan, PlanParameters
from hsstore.store import Store
from tests.stores import Sample


@pytest.fixture(scope="module")
def plan(shared_store: Store) -> Plan:
    parameters = PlanParameters(max_seq_len=50, split="all")
    return Plan(shared_store.index, shared_store.header.split, shared_store.manifest_id, parameters)


@pytest.fixture(scope="module")
def body(shared_store: Store, plan: Plan) -> bytes:
    view = gather.BatchView(shared_store, plan, 0, 1)
    return b"".join(view.pieces())


def test_safetensors_reads_what_we_write(body: bytes) -> None:
    theirs, ours = safetensors.torch.load(body), wire.parse(body)
    assert set(theirs) == set(ours.tensors)
    for name, array in ours.tensors.items():
        mine = torch.from_numpy(array.copy())
        mine = mine.view(torch.bfloat16) if ours.dtypes[name] == "BF16" else mine
        assert mine.dtype == theirs[name].dtype
        assert torch.equal(mine, theirs[name])


def test_a_packed_batch_is_its_samples_one_after_another(
    shared_store: Store, plan: Plan, samples: list[Sample]
) -> None:
    seen = 0
    for number in range(plan.epoch(0).n_batches):
        batch = gather.read(shared_store, plan, 0, number)
        t, bounds = batch.tensors, batch.tensors["cu_seqlens"]
        assert bounds[0] == 0
        assert bounds[-1] == batch.n_tokens <= 50
        for k, source in enumerate(t["source_index"]):
            rows, sample = slice(bounds[k], bounds[k + 1]), samples[int(source)]
            n = bounds[k + 1] - bounds[k]
            np.testing.assert_array_equal(t["input_ids"][rows], sample.input_ids[:n])
            np.testing.assert_array_equal(t["loss_mask"][rows], sample.loss_mask[:n])
            np.testing.assert_array_equal(t["position_ids"][rows], np.arange(n))
            for state, truth in sample.states.items():
                np.testing.assert_array_equal(t[f"hidden.{state}"][rows], truth[:n])
            seen += 1
    assert seen == plan.n_samples > 15


def test_tensors_are_aligned_and_views(body: bytes) -> None:
    batch = wire.parse(bytearray(body))
    for array in batch.tensors.values():
        assert array.ctypes.data % array.itemsize == 0
        assert array.base is not None


def test_the_header_names_where_a_batch_comes_from(plan: Plan, body: bytes) -> None:
    metadata = wire.parse(body).metadata
    assert metadata["plan_id"] == plan.plan_id
    assert metadata["manifest_id"] == plan.manifest_id
    assert (metadata["epoch"], metadata["batch"]) == ("0", "1")


def test_every_whole_block_is_checked_against_the_record(shared_store: Store, plan: Plan) -> None:
    compared = 0
    for number in range(plan.epoch(0).n_batches):
        batch = gather.read(shared_store, plan, 0, number)
        compared += wire.check_blocks(batch)
    assert compared > 10
    touched = 0
    for number in range(plan.epoch(0).n_batches):
        buffer = bytearray(b"".join(gather.BatchView(shared_store, plan, 0, number).pieces()))
        if wire.check_blocks(wire.parse(buffer)) == 0:
            continue
        batch = wire.parse(buffer)
        for name in ("hidden.final", "input_ids"):
            n = flip_until_found(buffer, batch, name)
            touched += n
    assert touched > 3


def flip_until_found(buffer: bytearray, batch: wire.Batch, name: str) -> int:
    """Flip each row in turn; count the rows whose block was whole and therefore noticed."""
    found = 0
    view = batch.tensors[name].view(np.uint8).reshape(batch.n_tokens, -1)
    for row in range(batch.n_tokens):
        view[row, 0] ^= 1
        found += is_noticed(batch, name)
        view[row, 0] ^= 1
    return found


def is_noticed(batch: wire.Batch, name: str) -> bool:
    try:
        wire.check_blocks(batch)
    except DamagedError as error:
        return name in str(error)
    return False


def test_gather_fills_the_buffer_or_refuses(shared_store: Store, plan: Plan, body: bytes) -> None:
    buffer = bytearray(len(body) + 7)
    assert gather.gather(shared_store, plan, 0, 1, buffer) == len(body)
    assert bytes(buffer[: len(body)]) == body
    small = bytearray(len(body) - 1)
    with pytest.raises(UsageError, match="buffer has"):
        gather.gather(shared_store, plan, 0, 1, small)
    assert not any(small)
    assert gather.read(shared_store, plan, 0, 1, small).n_tokens > 0


@given(st.binary(max_size=200))
def test_garbage_is_never_taken_for_a_batch(data: bytes) -> None:
    with pytest.raises(ServiceError):
        wire.parse(data)


@given(st.data())
def test_a_cut_or_changed_body_is_refused_or_still_a_batch(body: bytes, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(ServiceError):
        wire.parse(body[:cut])
    at = data.draw(st.integers(0, 900))
    changed = bytearray(body)
    changed[at] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(ServiceError):
        assert wire.parse(changed).tensors


@pytest.mark.parametrize("metadata", [{}, {"origin": "no json"}, {"origin": "{}"}])
def test_a_batch_without_origin_cannot_be_checked(body: bytes, metadata: dict[str, str]) -> None:
    batch = wire.parse(body)
    with pytest.raises(ServiceError, match="blocks"):
        wire.check_blocks(wire.Batch(tensors=batch.tensors, dtypes=batch.dtypes, metadata=metadata))
