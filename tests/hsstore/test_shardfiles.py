"""Both ways to read rows: equal bytes, bounded descriptors, and a sentence instead of SIGBUS when a file breaks."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsstore import prefault, shardfiles, zarrmeta
from hsstore.errors import DamagedError, UsageError
from hsstore.shardfiles import Backend
from hsstore.source import LocalSource, open_source
from hsstore.store import Store
from tests.stores import make_samples, make_store

BACKENDS: list[Backend] = ["mmap", "pread"]
FINAL = "arrays.zarr/hidden/final/c/0/0"


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 shards × 4 arrays: more files than the descriptors that some tests leave."""
    store = make_store(tmp_path_factory.mktemp("many") / "store", make_samples([60] * 40, seed=4), shard_rows=64)
    assert len(store.state.shards) == 40
    return store.root


def in_child(code: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("backend", BACKENDS)
@given(data=st.data())
def test_any_rows_are_the_bytes_of_the_file(shared_store: Store, backend: Backend, data: st.DataObject) -> None:
    """The oracle is `read` of the file."""
    store = Store.open(shared_store.root, backend=backend, max_maps=data.draw(st.integers(1, 3)))
    spec = data.draw(st.sampled_from(store.header.arrays))
    shard = data.draw(st.sampled_from(list(store.state.shards)))
    n_rows = store.state.shards[shard].n_rows
    first = data.draw(st.integers(0, n_rows - 1))
    n = data.draw(st.integers(1, n_rows - first))
    raw = (store.root / zarrmeta.chunk_path(spec, shard)).read_bytes()
    expected = raw[first * spec.row_bytes : (first + n) * spec.row_bytes]
    view = store.rows(spec.name, shard, first, n)
    assert view.readonly
    assert view == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shardfiles, "_STEP_BYTES", data.draw(st.integers(1, 5000)))
        patch.setattr(shardfiles, "_PART_BYTES", 4096)
        out = bytearray(len(expected))
        store.read_into(spec.name, shard, first, memoryview(out))
    assert out == expected


def test_an_unknown_backend_and_an_impossible_cap_are_refused(shared_store: Store) -> None:
    with pytest.raises(UsageError, match="mmap, pread"):
        Store.open(shared_store.root, backend="zip")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="max_maps"):
        Store.open(shared_store.root, max_maps=0)


TRUNCATE = """
    import os, sys, traceback
    from hsstore.errors import DamagedError
    from hsstore.plan import PlanParameters
    from hsstore.source import LocalSource
    from hsstore.store import Store
    from hsstore import gather, prefault, shardfiles
    root, backend, unprotected = sys.argv[1:]
    if unprotected == "yes":
        shardfiles.check_size = shardfiles.prefault = lambda *_: None
    path = f"{root}/arrays.zarr/hidden/final/c/0/0"
    tokens = f"{root}/arrays.zarr/tokens/input_ids/c/0"
    whole = {p: open(p, "rb").read() for p in (path, tokens)}
    plan = dict(max_seq_len=4096, split="all")

    def batch(source):
        info = source.make_plan(PlanParameters(**plan))
        for number in range(source.epoch_info(info.plan_id, 0).n_batches):
            source.read_batch(info.plan_id, 0, number)

    def gathered(store):
        buffer = bytearray(1 << 24)
        from hsstore.source import plan_of
        p = plan_of(store, PlanParameters(**plan))
        for number in range(p.epoch(0).n_batches):
            gather.gather(store, p, 0, number, buffer)

    last = 1
    ways = {
        "gather": (path, gathered),
        "batch": (path, lambda s: batch(LocalSource(s))),
        "checked batch": (path, lambda s: batch(LocalSource(s, verify="always"))),
        "hidden": (path, lambda s: s.hidden(last, "final")),
        "input_ids": (tokens, lambda s: s.input_ids(last)),
        "token_counts": (tokens, lambda s: s.token_counts("all")),
    }
    n = 0
    for name, (file, read) in ways.items():
        os.chmod(file, 0o644)
        sizes = [0, 4096, len(whole[file]) // 2 + 7]
        if backend == "mmap":  # a byte of the footer is nothing that pread would miss
            sizes.append(len(whole[file]) - 1)
        for size in sizes:
            open(file, "wb").write(whole[file])
            store = Store(root, backend=backend)
            read(store)  # maps or opens it
            os.truncate(file, size)
            try:
                read(store)
                sys.exit(f"{name}: nothing was noticed at {size} bytes")
            except DamagedError as error:
                assert "rows" in str(error) and "shard 0" in str(error), error
                n += 1
            open(file, "wb").write(whole[file])
            store.close()
            read(store)
    print(n)
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_file_cut_while_it_is_open_is_an_error_that_names_rows(tmp_path: Path, backend: Backend) -> None:
    """Real truncation under every road that copies: an error in each, and the file's repair is found."""
    store = make_store(tmp_path / "s", make_samples([3000, 3000], hidden_size=64), chunk_rows=256)
    assert len(store.state.shards) == 1
    done = in_child(TRUNCATE, store.root, backend, "no")
    assert (done.returncode, done.stderr) == (0, ""), "-7 would be SIGBUS"
    assert done.stdout == {"mmap": "24\n", "pread": "18\n"}[backend]


def test_without_the_check_the_same_cut_ends_the_process(tmp_path: Path) -> None:
    """So that the test above cannot pass because nothing would have happened anyway."""
    store = make_store(tmp_path / "s", make_samples([3000, 3000], hidden_size=64), chunk_rows=256)
    assert in_child(TRUNCATE, store.root, "mmap", "yes").returncode == -signal.SIGBUS


def test_an_older_kernel_looks_at_the_size(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MADV_POPULATE_READ is EINVAL before Linux 5.14."""
    monkeypatch.setattr(prefault, "MADV_POPULATE_READ", 12345)
    store = Store.open(store_path)
    expected = store.hidden(0, "final").copy()
    np.testing.assert_array_equal(store.hidden(0, "final"), expected)
    os.chmod(store_path / FINAL, 0o644)
    os.truncate(store_path / FINAL, 100)
    with pytest.raises(DamagedError, match="rows 0 to"):
        store.hidden(0, "final")
    with pytest.raises(DamagedError, match="rows 0 to"):
        store.read_into("hidden/final", 0, 0, memoryview(bytearray(64)))


def failing(code: int, times: int, then: Callable[..., Any]) -> Callable[..., Any]:
    left = [times]

    def call(*arguments: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise OSError(code, os.strerror(code))
        return then(*arguments)

    return call


@pytest.mark.parametrize("code", [errno.EIO, errno.EBADMSG, errno.EREMOTEIO])
def test_a_medium_that_gives_errors_is_damage_that_names_rows(
    shared_store: Store, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    source = LocalSource(Store.open(shared_store.root, backend="pread"))
    monkeypatch.setattr(os, "preadv", failing(code, 1, os.preadv))
    with pytest.raises(DamagedError, match=r"rows \d+ to \d+ of shard 0 .* cannot be read"):
        source.token_counts("all")
    source.token_counts("all")


def test_a_map_whose_pages_cannot_be_had_is_damage_that_names_rows(
    shared_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(shared_store.root)
    with monkeypatch.context() as patch:
        patch.setattr(prefault, "_madvise", lambda *_: errno.EFAULT)
        with pytest.raises(DamagedError, match=r"rows 0 to \d+ of shard 0"):
            store.read_into("hidden/final", 0, 0, memoryview(bytearray(32)))
    store.read_into("hidden/final", 0, 0, memoryview(bytearray(32)))


@pytest.mark.parametrize(("times", "fails"), [(1, False), (2, True)])
def test_a_stale_handle_is_opened_again_once(
    shared_store: Store, monkeypatch: pytest.MonkeyPatch, times: int, fails: bool
) -> None:
    """What an NFS client says after its server has started again."""
    store, expected = Store.open(shared_store.root, backend="pread"), shared_store.input_ids(3)
    monkeypatch.setattr(os, "preadv", failing(errno.ESTALE, times, os.preadv))
    if fails:
        with pytest.raises(OSError, match="handle"):
            store.input_ids(3)
    np.testing.assert_array_equal(store.input_ids(3), expected)


def test_short_reads_are_read_on(shared_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store, original = Store.open(shared_store.root, backend="pread"), os.preadv
    calls = []

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        return original(fd, [buffers[0][:7]], offset)

    monkeypatch.setattr(os, "preadv", short)
    np.testing.assert_array_equal(store.hidden(3, "final"), shared_store.hidden(3, "final"))
    assert len(calls) > 5


def n_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_open_files_are_capped(many: Path, backend: Backend) -> None:
    before = n_descriptors()
    store = Store.open(many, backend=backend, max_maps=5)
    copies = [store.sample(i, "hidden/final").tobytes() for i in range(len(store.index))]
    assert n_descriptors() - before == 5
    assert [store.sample(i, "hidden/final").tobytes() for i in range(len(store.index))] == copies
    store.close()
    assert n_descriptors() == before


LIMITED = """
    import resource, sys
    from hsstore.store import Store
    root, backend, limit = sys.argv[1:]
    store = Store(root, backend=backend)  # with the cap that is fit for this limit
    others = [open("/dev/null") for _ in range(int(limit))]
    soft = len(others) + 12
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft))
    n = 0
    for _ in range(2):
        for i in range(len(store.index)):
            for spec in store.header.arrays:
                n += store.rows(spec.name, int(store.index.shard[i]), 0, 1).nbytes > 0
    print(n)
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_low_limit_of_descriptors_makes_reading_slower_and_no_more(many: Path, backend: Backend) -> None:
    """Files that somebody else opened meanwhile leave fewer than the cap: maps are let go of, reading goes on."""
    done = in_child(LIMITED, many, backend, "30")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{2 * 40 * 4}\n", "")


def test_the_cap_leaves_half_of_the_descriptors_to_others(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, expected in ((1024, 256), (64, 32), (1, 1), (resource.RLIM_INFINITY, 256)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert shardfiles._cap(256) == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_read_through_a_cap_of_one(many: Path, backend: Backend) -> None:
    """A file that one thread lets go of must stay open under another that reads from it."""
    store, reference = Store.open(many, backend=backend, max_maps=1), Store.open(many)
    expected = [reference.sample(i, "hidden/final").tobytes() for i in range(40)]
    wrong: list[Any] = []

    def work(seed: int) -> None:
        try:
            for i in random.Random(seed).choices(range(40), k=300):
                if store.hidden(i, "final").tobytes() != expected[i]:
                    wrong.append(i)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def read_all(store: Store, rounds: int) -> bytes:
    order = random.Random(os.getpid())
    out = {}
    for _ in range(rounds):
        for i in order.sample(range(len(store.index)), len(store.index)):
            out[i] = store.hidden(i, "final").tobytes() + store.input_ids(i).tobytes()
    return b"".join(out[i] for i in sorted(out))


def answer(queue: Any, store: Store, rounds: int) -> None:
    queue.put(read_all(store, rounds))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_children_read_while_their_parent_does(many: Path, backend: Backend, method: str) -> None:
    """Descriptors are shared with a forked child; a file position that is shared too would mix up their reads."""
    store = Store.open(many, backend=backend, max_maps=9)
    expected = read_all(store, 1)
    context = multiprocessing.get_context(method)
    queue: Any = context.SimpleQueue()
    children = [context.Process(target=answer, args=(queue, store, 5)) for _ in range(2)]
    for child in children:
        child.start()
    assert read_all(store, 5) == expected
    assert [queue.get() for _ in children] == [expected] * 2
    for child in children:
        child.join()
        assert child.exitcode == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_child_forked_while_a_thread_opens_a_file_can_read(many: Path) -> None:
    """The lock is held by a thread that the child does not have."""
    store = Store.open(many)
    expected = store.input_ids(0).tobytes()
    with store._lock, store._reader._maps._lock:  # type: ignore[attr-defined]
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            os._exit(0 if store.input_ids(0).tobytes() == expected and len(store.block_crcs("hidden/final", 0)) else 1)
        _, status = os.waitpid(child, 0)
    assert status == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_repaired_file_is_read_under_its_old_name(store_path: Path, backend: Backend) -> None:
    """Repair renames a new file over the damaged one: a source that met the damage must not keep the old inode."""
    source = open_source(store_path, verify="always", backend=backend)
    from hsstore.plan import PlanParameters

    plan = source.make_plan(PlanParameters(split="all")).plan_id
    expected = source.read_batch(plan, 0, 0).tensors["hidden.final"].tobytes()
    path = store_path / FINAL
    shutil.copyfile(path, store_path / "good")
    os.chmod(path, 0o644)
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedError, match="CRC32C"):
        source.read_batch(plan, 0, 0)
    os.rename(store_path / "good", path)
    assert source.read_batch(plan, 0, 0).tensors["hidden.final"].tobytes() == expected
    source.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["fifo", "circle", "directory"])
def test_what_is_no_plain_file_is_damage_at_once(store_path: Path, backend: Backend, kind: str) -> None:
    """A FIFO would keep a reader waiting for ever."""
    path = store_path / FINAL
    path.unlink()
    {"fifo": os.mkfifo, "circle": lambda p: os.symlink(p, p), "directory": os.mkdir}[kind](path)
    with (
        Store.open(store_path, backend=backend) as store,
        pytest.raises(DamagedError, match=f"{FINAL} is no plain file") as caught,
    ):
        store.hidden(0, "final")
    assert "hsstore verify" in caught.value.hint
