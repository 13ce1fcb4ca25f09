"""Plans over HTTP: idempotent, forgettable, equal to the local ones."""

from __future__ import annotations

import dataclasses

import pytest

from hsstore.api import EpochInfo, PlanInfo
from hsstore.plan import PlanParameters
from hsstore.source import plan_of
from server.settings import Limits
from tests.server.live import fetch, serving

PARAMETERS = {"max_seq_len": 200, "seed": 7, "split": "train", "overflow": "drop"}


def test_the_same_parameters_are_the_same_plan(live, store):
    first = fetch("POST", f"{live.url}/v1/plans", body=PARAMETERS)
    again = fetch("POST", f"{live.url}/v1/plans", body={**PARAMETERS, "store": "tiny"})
    assert (first.status, again.status) == (201, 200)
    assert first.json() == again.json() == fetch("GET", live.url + first.headers["Location"]).json()
    assert first.json() == dataclasses.asdict(PlanInfo.of(plan_of(store, PlanParameters(**PARAMETERS))))


def test_a_whole_number_may_be_spelled_with_a_point(live):
    ids = {fetch("POST", f"{live.url}/v1/plans", body={"max_seq_len": n}).json()["plan_id"] for n in (300, 300.0)}
    assert len(ids) == 1


def test_an_epoch_says_what_it_left_out(live, store):
    location = fetch("POST", f"{live.url}/v1/plans", body=PARAMETERS).headers["Location"]
    found = fetch("GET", f"{live.url}{location}/epochs/3").json()
    assert found == dataclasses.asdict(EpochInfo.of(plan_of(store, PlanParameters(**PARAMETERS)), 3))
    assert found["n_dropped"] > 0


@pytest.mark.parametrize(
    "body",
    [
        {"max_seq_len": 1},
        {"max_seq_len": 2**40},
        {"max_seq_len": "4096"},
        {"max_seq_len": True},
        {"max_seq_len": 4096.5},
        {"seed": -1},
        {"seed": 2**63},
        {"split": "test"},
        {"overflow": "wrap"},
        {"max_seqlen": 4096},
        [],
        "x",
    ],
)
def test_parameters_that_make_no_plan_are_refused(live, body):
    answer = fetch("POST", f"{live.url}/v1/plans", body=body)
    assert (answer.status, answer.json()["kind"]) == (422, "usage")


def test_an_unknown_plan_says_how_to_make_it(live):
    for path in ("", "/epochs/0", "/epochs/0/batches/0"):
        answer = fetch("GET", f"{live.url}/v1/plans/{'0' * 64}{path}")
        assert (answer.status, answer.json()["kind"]) == (404, "not_found")
        assert "POST" in answer.json()["hint"]


def test_the_least_used_plan_is_forgotten_and_comes_back(store):
    with serving(store.root, limits=Limits(plans=2, grace_seconds=1)) as live:

        def post(seed):
            return fetch("POST", f"{live.url}/v1/plans", body={"seed": seed})

        url = live.url + post(0).headers["Location"]
        post(1)
        assert fetch("GET", url).status == 200  # now 1 is the least used one
        post(2)
        assert fetch("GET", url).status == 200
        assert post(1).status == 201
        assert fetch("GET", url).status == 200 or post(0).status == 201
