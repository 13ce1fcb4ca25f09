"""The OpenAPI document is true: schemathesis finds no 5xx and no answer that it does not describe."""

from __future__ import annotations

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from server.app import create_app
from server.settings import Settings
from tests.server.live import fetch


def test_every_path_documents_its_problems(live):
    document = fetch("GET", f"{live.url}/openapi.json").json()
    paths = document["paths"]
    assert len(paths) >= 12
    for path, operations in paths.items():
        for operation in operations.values():
            assert "application/problem+json" in operation["responses"]["default"]["content"], path
    names = [o["operationId"] for operations in paths.values() for o in operations.values()]
    assert len(names) == len(set(names))


def test_answers_conform_to_the_document(store):
    app = create_app(Settings(stores=(store.root,)))
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    statuses: set[int] = set()
    bounded = settings(
        max_examples=12,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for result in schema.get_all_operations():
        operation = result.ok()

        @bounded
        @given(case=operation.as_strategy())
        def check(case):
            statuses.add(case.call_and_validate().status_code)

        check()
    assert {200, 201, 404} <= statuses, "the generated requests reached too little"
