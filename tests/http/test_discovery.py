"""What a client can find out: health, models, capabilities, metrics, the OpenAPI document and its page."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from typing import Any

import msgspec
import trio

from hermes_trio.http.api.docs_page import EXAMPLES
from hermes_trio.http.core import CronPort
from hermes_trio.runtime.ends import End
from hermes_trio.store import StoreFull

from .gateway import open_gateway


async def test_health(fast_path: bool) -> None:
    """Health is open, cheap, and the same on both paths; HEAD works, too."""
    async with open_gateway(fast_path=fast_path) as gateway:
        for path in ("/health", "/v1/health"):
            answer = await gateway.http.get(path, headers={"Authorization": ""})
            assert answer.json() == {"status": "ok", "platform": "api_server", "version": "test"}
        head = await gateway.http.head("/health")
        assert (head.status_code, head.content) == (200, b"")


async def test_detailed_health() -> None:
    """The detailed health names its checks, what runs, and whether the server can be drained."""
    async with open_gateway() as gateway:
        body = (await gateway.http.get("/health/detailed")).json()
        assert body["status"] in ("ok", "degraded")
        assert set(body["readiness"]["checks"]) == {
            "state_db",
            "config",
            "model",
            "disk",
            "gateway",
            "background_queues",
        }
        assert body["readiness"]["checks"]["state_db"]["status"] == "ok"
        assert (body["gateway_state"], body["active_agents"], body["gateway_drainable"]) == ("running", 0, True)


async def test_ends_that_wait_are_named_and_503_means_that_no_write_succeeds() -> None:
    """While an end waits the report says `degraded` and names it; it is 503 only while nothing can be written."""
    refused = True

    async def write() -> None:
        if refused:
            raise StoreFull("no space left")

    async def fail() -> None:
        raise StoreFull("no space left")

    async with open_gateway() as gateway, trio.open_nursery() as nursery:
        ends = gateway.runtime.core.ends
        nursery.start_soon(ends.put, End("turn turn_1", write))
        while not len(ends):  # noqa: ASYNC110 - it waits as soon as it has been refused
            await trio.sleep(0.01)
        answer = await gateway.http.get("/health/detailed")
        check = answer.json()["readiness"]["checks"]["ends"]
        assert (answer.status_code, answer.json()["status"], check["status"]) == (200, "degraded", "degraded")
        assert "turn turn_1" in check["waiting"][0]
        _, secret = await gateway.core.store.create_api_key("dev", scopes=("runs",), tenant="acme")
        other = await gateway.http.get("/health/detailed", headers={"Authorization": f"Bearer {secret}"})
        # The count is everybody's, the names are of every tenant's work.
        assert other.json()["readiness"]["checks"]["ends"] == {"status": "degraded", "count": 1}
        works, gateway.runtime.store.probe = gateway.runtime.store.probe, fail  # type: ignore[method-assign]
        assert (await gateway.http.get("/health/detailed")).status_code == 503
        gateway.runtime.store.probe = works  # type: ignore[method-assign]
        refused = False
        while len(ends):  # noqa: ASYNC110
            await trio.sleep(0.01)
        assert "ends" not in (await gateway.http.get("/health/detailed")).json()["readiness"]["checks"]


async def test_models(fast_path: bool) -> None:
    """The list begins with the advertised name; one model can be asked for; an unknown one is 404."""
    async with open_gateway(fast_path=fast_path) as gateway:
        body = (await gateway.http.get("/v1/models")).json()
        assert body["object"] == "list"
        model = body["data"][0]
        assert (model["id"], model["object"], model["root"], model["parent"]) == (
            "hermes-trio",
            "model",
            "hermes-trio",
            None,
        )
        assert (await gateway.http.get("/v1/models/hermes-trio")).json()["id"] == "hermes-trio"
        unknown = await gateway.http.get("/v1/models/nope")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


async def test_capabilities() -> None:
    """The capabilities name every route that there is, and say that nothing is delivered later."""
    async with open_gateway() as gateway:
        body = (await gateway.http.get("/v1/capabilities")).json()
        assert body["features"]["async_delivery"] is False
        assert body["features"]["jobs"] is False
        assert body["auth"] == {"type": "bearer", "required": True}
        assert body["endpoints"]["runs_start"] == {"method": "POST", "path": "/v1/runs"}
        assert len(body["endpoints"]) == len(gateway.core.routes)


async def test_metrics() -> None:
    """Requests are counted by route and status; gauges say what is alive; no client chooses a label."""
    async with open_gateway() as gateway:
        await gateway.chat()
        await gateway.http.get("/v1/runs/run_odd")
        answer = await gateway.http.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        assert 'hermes_http_requests_total{route="chat_completions",status="200"} 1.0' in answer.text
        assert 'hermes_http_requests_total{route="run",status="404"} 1.0' in answer.text
        assert "hermes_turns_active 0.0" in answer.text
        assert 'hermes_tree_nodes{kind="runtime"} 1.0' in answer.text
        assert "run_odd" not in answer.text


async def test_the_openapi_document_describes_every_route() -> None:
    """Every route of the table is in the document, every reference in it leads somewhere, and every error has the envelope."""
    async with open_gateway(cron=_Cron()) as gateway:
        body = (await gateway.http.get("/openapi.json", headers={"Authorization": ""})).json()
        assert body["openapi"].startswith("3.1")
        for route in gateway.core.routes:
            operation = body["paths"][route.path][route.method.lower()]
            assert operation["operationId"] == route.name
            assert operation["summary"]
            assert str(route.status) in operation["responses"]
            assert ("401" in operation["responses"]) is (route.access.value != "open")
        references = set(re.findall(r'"#/components/schemas/([^"]+)"', (await gateway.http.get("/openapi.json")).text))
        assert references <= set(body["components"]["schemas"])


async def test_the_docs_page_loads_nothing_from_elsewhere() -> None:
    """The page is HTML without inline scripts or links to other hosts, and says so in its policy; its one script is the server's own."""
    async with open_gateway() as gateway:
        answer = await gateway.http.get("/docs", headers={"Authorization": ""})
        assert answer.headers["content-type"].startswith("text/html")
        assert re.findall(r"<script[^>]*>", answer.text) == ["<script src='/docs.js' defer>"]
        policy = answer.headers["content-security-policy"]
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        [style] = re.findall(r"<style>(.*?)</style>", answer.text)
        assert f"'sha256-{b64encode(sha256(style.encode()).digest()).decode()}'" in policy
        script = await gateway.http.get("/docs.js", headers={"Authorization": ""})
        assert script.headers["content-type"].startswith("text/javascript")
        assert "http" not in script.text
        assert not re.search(r"(src|href)=['\"]?(https?:)?//", answer.text)
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
        assert "/v1/runs" in answer.text


async def test_the_docs_page_shows_how_to_use_every_route() -> None:
    """Every route has its fields, a `curl` line and a form; types are links that lead somewhere; nothing is raw JSON."""
    async with open_gateway(cron=_Cron()) as gateway:
        text = (await gateway.http.get("/docs")).text
        anchors = set(re.findall(r"id='([^']+)'", text))
        assert set(re.findall(r"href='#([^']+)'", text)) <= anchors
        for route in gateway.core.routes:
            if not route.listed:
                continue
            [section] = re.findall(rf"<details id='{route.name}'>(.*?)</details>", text, re.DOTALL)
            assert "<pre>curl -s" in section, route.name
            assert f"data-method={route.method}" in section, route.name
            assert "&quot;$ref&quot;" not in section
            if route.body is not None:
                msgspec.convert(EXAMPLES[route.name], route.body)
                assert "<textarea" in section, route.name
                for field in getattr(route.body, "__struct_fields__", ()):
                    assert f"<code>{field}</code>" in section, (route.name, field)


class _Cron(CronPort):
    """A scheduler that remembers jobs."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}

    async def list_jobs(self, tenant: str | None, *, include_disabled: bool) -> list[dict[str, Any]]:
        return [job for job in self.jobs.values() if include_disabled or job["enabled"]]

    async def create_job(self, tenant: str, fields: Any) -> dict[str, Any]:
        if fields["schedule"] == "never":
            raise ValueError("never is not a schedule; try `every 5m`")
        job = {"id": f"{len(self.jobs):012x}", "enabled": True, **fields}
        self.jobs[job["id"]] = job
        return job

    async def get_job(self, tenant: str | None, job_id: str) -> dict[str, Any] | None:
        return self.jobs.get(job_id)

    async def update_job(self, tenant: str | None, job_id: str, fields: Any) -> dict[str, Any] | None:
        if job_id in self.jobs:
            self.jobs[job_id] |= fields
        return self.jobs.get(job_id)

    async def delete_job(self, tenant: str | None, job_id: str) -> bool:
        return self.jobs.pop(job_id, None) is not None

    async def pause_job(self, tenant: str | None, job_id: str) -> dict[str, Any] | None:
        return await self.update_job(tenant, job_id, {"enabled": False})

    async def resume_job(self, tenant: str | None, job_id: str) -> dict[str, Any] | None:
        return await self.update_job(tenant, job_id, {"enabled": True})

    async def run_job(self, tenant: str | None, job_id: str) -> dict[str, Any] | None:
        return self.jobs.get(job_id)

    async def executions(self, tenant: str | None, job_id: str, limit: int = 20) -> list[dict[str, Any]] | None:
        slots = [{"slot": f"2026-01-0{day}", "state": "finished", "output": "x" * 5000} for day in (2, 1)]
        return slots[:limit] if job_id in self.jobs else None


async def test_jobs_exist_where_a_scheduler_does(fast_path: bool) -> None:
    """Without a scheduler there are no job routes; with one they make, change, pause, run and delete jobs."""
    async with open_gateway(fast_path=fast_path) as gateway:
        assert (await gateway.http.get("/api/jobs")).status_code == 404
    async with open_gateway(fast_path=fast_path, cron=_Cron()) as gateway:
        body = {"name": "daily", "schedule": "0 9 * * *", "prompt": "say hello"}
        job = (await gateway.http.post("/api/jobs", json=body)).json()["job"]
        path = f"/api/jobs/{job['id']}"
        assert (await gateway.http.get(path)).json()["job"]["deliver"] == "local"
        changed = await gateway.http.patch(path, json={"name": "weekly", "odd": 1})
        assert (changed.json()["job"]["name"], "odd" in changed.json()["job"]) == ("weekly", False)
        changed = await gateway.http.patch(path, json={"model": "large", "deadline": 90})
        assert (changed.json()["job"]["model"], changed.json()["job"]["deadline"]) == ("large", 90)
        changed = await gateway.http.patch(path, json={"model": None, "deadline": None})
        assert (changed.json()["job"]["model"], changed.json()["job"]["deadline"]) == (None, None)
        assert (await gateway.http.post(f"{path}/pause")).json()["job"]["enabled"] is False
        assert (await gateway.http.get("/api/jobs")).json() == {"jobs": []}
        assert len((await gateway.http.get("/api/jobs", params={"include_disabled": "1"})).json()["jobs"]) == 1
        assert (await gateway.http.post(f"{path}/resume")).json()["job"]["enabled"] is True
        assert (await gateway.http.post(f"{path}/run")).status_code == 200
        (slot,) = (await gateway.http.get(f"{path}/executions", params={"limit": 1})).json()["data"]
        assert (slot["slot"], slot["state"], len(slot["output"])) == ("2026-01-02", "finished", 2000)
        assert (await gateway.http.get(f"/api/jobs/{'0' * 11}9/executions")).status_code == 404
        assert (await gateway.http.delete(path)).json() == {"ok": True}
        for method, where in (("GET", path), ("PATCH", path), ("DELETE", path), ("POST", f"{path}/run")):
            assert (await gateway.http.request(method, where, json={"name": "x"})).status_code == 404
        right = {"name": "x", "schedule": "x", "prompt": "x"}
        for wrong, param in (
            ({}, "name"),
            ({"name": "x"}, "schedule"),
            ({"name": "x", "schedule": "x"}, "prompt"),
            ({**right, "name": ""}, "name"),
            ({**right, "name": "x" * 201}, "name"),
            ({**right, "schedule": "never"}, None),
            ({**right, "schedule": 5}, "schedule"),
            ({**right, "prompt": "p" * 5001}, "prompt"),
            ({**right, "prompt": " "}, "prompt"),
            ({**right, "prompt": None}, "prompt"),
            ({**right, "repeat": 0}, "repeat"),
            ({**right, "skills": ["news"]}, "skills"),
            ({**right, "skill": "news"}, "skill"),
            ({**right, "model": 5}, "model"),
            ({**right, "model": "m" * 201}, "model"),
            ({**right, "deadline": 0}, "deadline"),
            ({**right, "deadline": -1.5}, "deadline"),
            ({**right, "deadline": "60"}, "deadline"),
            ({**right, "deadline": True}, "deadline"),
            ({**right, "deadline": 10**400}, "deadline"),
        ):
            answer = await gateway.http.post("/api/jobs", json=wrong)
            assert answer.status_code == 400, wrong
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert (error["param"], error["code"]) == (param, "invalid_job"), wrong
        assert (await gateway.http.get("/api/jobs/NOT-HEX")).status_code == 400
        assert (await gateway.http.patch(path, json={"odd": 1})).status_code == 400


async def test_a_job_with_skills_is_refused_and_not_made_without_them(fast_path: bool) -> None:
    """There are no skills: a job that names some says so in a 400, made or changed; empty ones ask for nothing, and nothing is shown of them."""
    right = {"name": "x", "schedule": "x", "prompt": "x"}
    async with open_gateway(fast_path=fast_path, cron=_Cron()) as gateway:
        made = await gateway.http.post("/api/jobs", json={**right, "skills": [], "skill": None})
        job = made.json()["job"]
        assert not {"skills", "skill"} & set(job)
        path = f"/api/jobs/{job['id']}"
        for wrong in ({"skills": ["news"]}, {"skill": "news"}, {"skills": "news"}, {"name": "y", "skill": "news"}):
            for method, where, body in (("POST", "/api/jobs", {**right, **wrong}), ("PATCH", path, wrong)):
                answer = await gateway.http.request(method, where, json=body)
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (400, "invalid_job"), body
                assert error["param"] in wrong
                assert "has no skills" in error["message"]
        assert (await gateway.http.get("/api/jobs")).json()["jobs"] == [job]
        nothing = await gateway.http.patch(path, json={"skills": []})
        assert nothing.status_code == 400
        assert "skill" not in nothing.json()["error"]["message"]
        described = (await gateway.http.get("/openapi.json")).json()["components"]["schemas"]
        assert not {"skills", "skill"} & set(described["JobRequest"]["properties"])
