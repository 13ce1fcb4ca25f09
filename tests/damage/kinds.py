"""Every kind of damage, as a function that does it to the store at a random place."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from random import Random

from tests.damage.world import BLOCK_ROWS, World

Damage = Callable[[World, Random], None]
KINDS: dict[str, Damage] = {}


def kind(function: Damage) -> Damage:
    KINDS[function.__name__] = function
    return function


def _data(world: World, rng: Random, prefix: str = "arrays.zarr/") -> str:
    return rng.choice([n for n in sorted(world.files) if n.startswith(prefix)])


def _document(world: World, rng: Random, prefix: str = "") -> str:
    return rng.choice([n for n in world.documents if n.startswith(prefix)])


def _flip(world: World, rng: Random, name: str, start: int, stop: int) -> None:
    data = bytearray((world.root / name).read_bytes())
    data[rng.randrange(start, stop)] ^= 1 << rng.randrange(8)
    world.write(name, bytes(data))


def _flip_document(world: World, rng: Random, prefix: str) -> None:
    name = _document(world, rng, prefix)
    _flip(world, rng, name, 0, len(world.read(name)))


@kind
def flip_in_states(world: World, rng: Random) -> None:
    name = _data(world, rng, "arrays.zarr/hidden/")
    file = world.files[name]
    _flip(world, rng, name, 0, file.record.n_rows * file.spec.row_bytes)


@kind
def flip_in_tokens(world: World, rng: Random) -> None:
    name = _data(world, rng, "arrays.zarr/tokens/")
    file = world.files[name]
    _flip(world, rng, name, 0, file.record.n_rows * file.spec.row_bytes)


@kind
def flip_behind_the_last_row(world: World, rng: Random) -> None:
    """In the zeros that fill the last block up."""
    filled = [n for n, f in sorted(world.files.items()) if f.record.n_rows % BLOCK_ROWS]
    name = rng.choice(filled)
    file = world.files[name]
    _flip(world, rng, name, file.record.n_rows * file.spec.row_bytes, file.data_bytes)


@kind
def flip_in_footer(world: World, rng: Random) -> None:
    name = _data(world, rng)
    _flip(world, rng, name, world.files[name].data_bytes, len(world.read(name)))


@kind
def flip_in_record(world: World, rng: Random) -> None:
    _flip_document(world, rng, "records/")


@kind
def flip_in_layout(world: World, rng: Random) -> None:
    _flip_document(world, rng, "layouts/")


@kind
def flip_in_tombstone(world: World, rng: Random) -> None:
    _flip_document(world, rng, "tombstones/")


@kind
def flip_in_store_json(world: World, rng: Random) -> None:
    _flip_document(world, rng, "store.json")


@kind
def flip_in_zarr_json(world: World, rng: Random) -> None:
    _flip_document(world, rng, "arrays.zarr/")


@kind
def flip_in_manifest(world: World, rng: Random) -> None:
    _flip_document(world, rng, "manifest.json")


@kind
def flip_in_kept_manifest(world: World, rng: Random) -> None:
    _flip_document(world, rng, "manifests/")


@kind
def flip_in_sha256_list(world: World, rng: Random) -> None:
    _flip_document(world, rng, "manifest.sha256")


@kind
def flip_in_index(world: World, rng: Random) -> None:
    _flip_document(world, rng, "index/")


@kind
def flips_in_several_files(world: World, rng: Random) -> None:
    for name in rng.sample(sorted(world.files), rng.randrange(2, 8)):
        for _ in range(rng.randrange(1, 5)):
            _flip(world, rng, name, 0, len(world.read(name)))


@kind
def overwritten_range(world: World, rng: Random) -> None:
    """Noise over some bytes of a shard file, over the ends of blocks too."""
    name = _data(world, rng)
    data = bytearray(world.read(name))
    start = rng.randrange(len(data))
    stop = min(len(data), start + rng.randrange(1, 2000))
    data[start:stop] = rng.randbytes(stop - start)
    world.write(name, bytes(data))


@kind
def zeroed_sector(world: World, rng: Random) -> None:
    name = _data(world, rng)
    data = bytearray(world.read(name))
    start = rng.randrange(0, len(data), 512)
    data[start : start + 512] = bytes(len(data[start : start + 512]))
    world.write(name, bytes(data))


@kind
def zeroed_file(world: World, rng: Random) -> None:
    name = _data(world, rng)
    world.write(name, bytes(len(world.read(name))))


@kind
def zeroed_document(world: World, rng: Random) -> None:
    name = _document(world, rng)
    world.write(name, bytes(len(world.read(name))))


@kind
def zeroed_tail(world: World, rng: Random) -> None:
    """What a crash leaves of a file whose size reached the disk before its bytes."""
    name = rng.choice([*sorted(world.files), *world.documents])
    data = world.read(name)
    start = rng.randrange(len(data))
    world.write(name, data[:start] + bytes(len(data) - start))


@kind
def misdirected_block(world: World, rng: Random) -> None:
    """A block of a file lies over another one of it."""
    name = rng.choice([n for n, f in sorted(world.files.items()) if f.n_blocks > 1])
    size, data = world.files[name].block_bytes, bytearray(world.read(name))
    source, target = rng.sample(range(world.files[name].n_blocks), 2)
    data[target * size : (target + 1) * size] = data[source * size : (source + 1) * size]
    world.write(name, bytes(data))


@kind
def truncated_file(world: World, rng: Random) -> None:
    name = _data(world, rng)
    world.write(name, world.read(name)[: rng.randrange(len(world.read(name)))])


@kind
def truncated_and_flipped(world: World, rng: Random) -> None:
    """The blocks that are left are still judged one by one."""
    name = _data(world, rng)
    data = bytearray(world.read(name)[: rng.randrange(1, len(world.read(name)))])
    data[rng.randrange(len(data))] ^= 1
    world.write(name, bytes(data))


@kind
def truncated_document(world: World, rng: Random) -> None:
    name = _document(world, rng)
    world.write(name, world.read(name)[: rng.randrange(len(world.read(name)))])


@kind
def extended_file(world: World, rng: Random) -> None:
    name = _data(world, rng)
    more = rng.randrange(1, 5000)
    world.write(name, world.read(name) + rng.choice([bytes(more), rng.randbytes(more)]))


@kind
def extended_document(world: World, rng: Random) -> None:
    name = _document(world, rng)
    more = rng.randrange(1, 50)
    world.write(name, world.read(name) + rng.choice([bytes(more), rng.randbytes(more), b" " * more, b"\n" * more]))


@kind
def empty_file(world: World, rng: Random) -> None:
    world.write(rng.choice([*sorted(world.files), *world.documents]), b"")


@kind
def noise_of_the_same_size(world: World, rng: Random) -> None:
    name = rng.choice([*sorted(world.files), *world.documents])
    world.write(name, rng.randbytes(len(world.read(name))))


def _swap(world: World, names: Sequence[str]) -> None:
    first, second = names
    world.write(first, world.read(second))
    world.write(second, world.read(first))


@kind
def swapped_arrays(world: World, rng: Random) -> None:
    """Two files of one shard: equal sizes, equal footers."""
    shard = rng.choice([f.record.shard for f in world.files.values()])
    of_one = [n for n, f in sorted(world.files.items()) if f.record.shard == shard and f.spec.row_shape]
    _swap(world, rng.sample(of_one, 2))


@kind
def swapped_files(world: World, rng: Random) -> None:
    _swap(world, rng.sample(sorted(world.files), 2))


@kind
def swapped_documents(world: World, rng: Random) -> None:
    _swap(world, rng.sample(world.documents, 2))


@kind
def swapped_records(world: World, rng: Random) -> None:
    _swap(world, rng.sample([n for n in world.documents if n.startswith("records/")], 2))


@kind
def missing_file(world: World, rng: Random) -> None:
    (world.root / _data(world, rng)).unlink()


@kind
def missing_document(world: World, rng: Random) -> None:
    """None of the kept manifests: nothing names them."""
    (world.root / rng.choice([n for n in world.documents if not n.startswith("manifests/")])).unlink()


@kind
def renamed_file(world: World, rng: Random) -> None:
    path = world.root / rng.choice([*sorted(world.files), *world.documents])
    path.rename(path.with_name(path.name + rng.choice([".bak", "~", ".1"])))


@kind
def no_plain_file(world: World, rng: Random) -> None:
    path = world.root / rng.choice([*sorted(world.files), *world.documents])
    path.unlink()
    match rng.randrange(4):
        case 0:
            os.mkfifo(path)
        case 1:
            path.mkdir()
            (path / "in-it").write_bytes(b"?")
        case 2:
            path.symlink_to("nowhere")
        case 3:
            path.symlink_to(path.name)


@kind
def foreign_file(world: World, rng: Random) -> None:
    directory = rng.choice(
        ["", "records/", "layouts/", "index/", "manifests/", "arrays.zarr/", "arrays.zarr/hidden/c/"]
    )
    name = rng.choice(["notes.txt", ".DS_Store", "0", "000099.json.bak", "uid.npz", "\udcff\n.x", "zarr.json~"])
    world.write(directory + name, rng.randbytes(rng.randrange(100)))


@kind
def foreign_shard_file(world: World, rng: Random) -> None:
    name, shard = _data(world, rng), rng.randrange(50, 99)
    head, _, tail = name.rpartition("/c/")
    world.write(f"{head}/c/{shard}" + ("/0" if "/" in tail else ""), world.read(name))


@kind
def foreign_record(world: World, rng: Random) -> None:
    """Of a shard that no layout has: a sound record under another number, or of this store's number elsewhere."""
    name = rng.choice([n for n in world.documents if n.startswith("records/")])
    world.write(f"records/{rng.randrange(50, 99):06d}.json", world.read(name))


@kind
def file_of_another_store(world: World, rng: Random) -> None:
    name = _data(world, rng)
    data = world.foreign[name]
    assert data is not None
    world.write(name, data)


@kind
def record_of_another_store(world: World, rng: Random) -> None:
    _of_another_store(world, rng, "records/")


@kind
def document_of_another_store(world: World, rng: Random) -> None:
    _of_another_store(world, rng, "")


def _of_another_store(world: World, rng: Random, prefix: str) -> None:
    name = rng.choice([n for n in world.documents if n.startswith(prefix) and n in world.foreign])
    data = world.foreign[name]
    assert data is not None
    world.write(name, data)


@kind
def shard_of_another_store(world: World, rng: Random) -> None:
    """Its record and all its files: sound in themselves."""
    shard = rng.choice([f.record.shard for f in world.files.values()])
    for name in [f"records/{shard:06d}.json", *(n for n, f in world.files.items() if f.record.shard == shard)]:
        data = world.foreign[name]
        assert data is not None
        world.write(name, data)


@kind
def anything_in_a_quarantined_shard(world: World, rng: Random) -> None:
    """It is out of use: nothing there is damage."""
    name = rng.choice(world.dead)
    if rng.random() < 0.3:
        (world.root / name).unlink()
    else:
        world.write(name, rng.randbytes(rng.randrange(1, 3000)))
