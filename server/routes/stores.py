"""Stores: what is served, its manifest, its samples, its token counts. All answers are read-only views."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from hsstore import wire
from hsstore.api import SampleDetail, SamplePage, StoreDetail, StoreInfo
from hsstore.index import SplitName
from server.routes.common import NOT_MODIFIED, ServiceDep, binary, document, documented, matches
from server.settings import Limits

router = APIRouter(prefix="/v1/stores", tags=["stores"])
MAX_OFFSET = 2**53
PAGE_SAMPLES = Limits().page_samples


@router.get("")
def list_stores(service: ServiceDep) -> list[StoreInfo]:
    """Every served store."""
    return [served.info() for served in service.stores.values()]


@router.get("/{store}", response_class=Response, responses=documented(StoreDetail, "The store"))
def show_store(service: ServiceDep, store: str) -> Response:
    """Identity, totals and header of a store."""
    served = service.store(store)
    return document(StoreDetail(info=served.info(), header=served.store.header))


@router.get(
    "/{store}/manifest",
    response_class=Response,
    responses={200: {"description": "manifest.json", "content": {"application/json": {}}}, **NOT_MODIFIED},
)
def manifest(service: ServiceDep, request: Request, store: str) -> Response:
    """The canonical manifest, byte for byte: its SHA-256 is the manifest_id and the ETag."""
    served = service.store(store)
    headers = {"ETag": f'"{served.store.manifest_id}"', "Cache-Control": "no-cache"}
    if matches(request, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    return Response(served.store.manifest_bytes(), headers=headers, media_type="application/json")


@router.get("/{store}/samples")
def list_samples(
    service: ServiceDep,
    store: str,
    offset: Annotated[int, Query(ge=0, le=MAX_OFFSET)] = 0,
    limit: Annotated[int, Query(ge=1, le=PAGE_SAMPLES)] = 100,
) -> SamplePage:
    """A page of samples in source order, failed ones included."""
    return service.store(store).page(offset, limit)


@router.get("/{store}/samples/{sample}")
def show_sample(service: ServiceDep, store: str, sample: str) -> SampleDetail:
    """One sample by source_index or uid, with its ids and loss mask."""
    return service.store(store).detail(sample)


@router.get(
    "/{store}/token_counts",
    response_class=Response,
    responses=binary("safetensors file with `counts` I64 [V]: how often each token is a trained one in the split"),
)
def token_counts(service: ServiceDep, store: str, split: SplitName = "train") -> Response:
    """Loss-masked token counts of a split, for the drafter's vocabulary."""
    served = service.store(store)
    counts = served.token_counts(split).astype("<i8")
    header = wire.header(
        [wire.TensorSpec(name="counts", dtype="I64", shape=counts.shape)],
        {"manifest_id": served.store.manifest_id, "split": split},
    )
    return Response(header + counts.tobytes(), media_type="application/octet-stream")
