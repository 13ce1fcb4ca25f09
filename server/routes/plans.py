"""Plans: POST makes one or finds it again; a plan is a pure function of its parameters, so the server may forget it."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from hsstore.api import EpochInfo, PlanInfo
from hsstore.index import SplitName
from hsstore.plan import MAX_SEQ_LEN, PlanParameters
from server.routes.common import ServiceDep

router = APIRouter(prefix="/v1/plans", tags=["plans"])
Epoch = Annotated[int, Path(ge=0, lt=2**31)]


def _whole(value: object) -> object:
    """JSON Schema's integer: 4096.0 is one, "4096" and true are not."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]


class PlanRequest(BaseModel):
    """Parameters of a plan; what is left out has the default of `hsstore.plan.PlanParameters`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    store: str | None = Field(None, description="Name of the store; may be left out where one is served.")
    max_seq_len: Whole = Field(4096, ge=2, le=MAX_SEQ_LEN, description="Budget of a batch in tokens.")
    seed: Whole = Field(0, ge=0, lt=2**63)
    split: SplitName = "train"
    overflow: Literal["truncate", "drop"] = "truncate"

    def parameters(self) -> PlanParameters:
        return PlanParameters(max_seq_len=self.max_seq_len, seed=self.seed, split=self.split, overflow=self.overflow)


@router.post("", responses={201: {"model": PlanInfo, "description": "Made now"}})
def make_plan(service: ServiceDep, body: PlanRequest, response: Response) -> PlanInfo:
    """Make a plan, or find it again. Idempotent: equal parameters give the same plan_id for ever."""
    held, new = service.make_plan(body.store, body.parameters())
    if new:
        response.status_code = 201
    response.headers["Location"] = f"/v1/plans/{held.plan.plan_id}"
    return held.info()


@router.get("/{plan_id}")
def show_plan(service: ServiceDep, plan_id: str) -> PlanInfo:
    """Parameters and totals of a plan."""
    return service.plan(plan_id).info()


@router.get("/{plan_id}/epochs/{epoch}")
def show_epoch(service: ServiceDep, plan_id: str, epoch: Epoch) -> EpochInfo:
    """What an epoch holds, and what was cut or left out."""
    return service.plan(plan_id).epoch(epoch)
