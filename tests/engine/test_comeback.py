"""Requests that arrive while a stage is down wait if it is coming back, and hear at once if it is not."""

from __future__ import annotations

import asyncio

import pytest

from omnistage.config.model import OmniConfig, PipelineConfig
from omnistage.config.resolve import resolve_config
from omnistage.connectors.inline import LocalStore
from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.errors import ErrorCode, RequestError
from omnistage.runtime.plan import HostPlan
from omnistage.runtime.stage_runtime import PATIENT_FAILURES
from omnistage.stages.base import StepOutput
from omnistage.testing.leakcheck import settled
from omnistage.testing.virtual import Stages, VirtualHost, run
from tests.engines import answer

TEXT = "a short text"


def instantly(stage: str, output: StepOutput) -> float:
    return 0.001


class Fragile(Stages):
    """Stages whose hosts, by name, do not start any more once they are listed in `broken`."""

    def __init__(self) -> None:
        super().__init__(instantly)
        self.broken: set[str] = set()

    def __call__(self, plan: HostPlan, config: OmniConfig, pipeline: PipelineConfig, store: LocalStore) -> VirtualHost:
        host = super().__call__(plan, config, pipeline, store)
        if plan.name in self.broken:
            host.kill()
        return host


@pytest.mark.parametrize("stage", ["thinker", "talker", "wave"])
def test_request_that_comes_while_a_stage_restarts_waits_for_it_and_is_answered(stage: str) -> None:
    async def main() -> None:
        stages = Fragile()
        async with AsyncOmniEngine(resolve_config("echo3", None, {}), stages) as engine:
            stages.hosts[f"{stage}/0"].kill()
            while engine.health().ready:
                await asyncio.sleep(0.001)
            result = await answer(engine, id="a", prompt=TEXT)
            assert (result.text, result.error) == (TEXT, None)
            await settled(engine)

    run(main())


def test_request_waits_no_longer_than_its_own_deadline() -> None:
    async def main() -> None:
        stages = Fragile()
        async with AsyncOmniEngine(resolve_config("echo3", None, {}), stages) as engine:
            stages.hosts["wave/0"].kill()
            while engine.health().ready:
                await asyncio.sleep(0.001)
            result = await answer(engine, id="a", prompt=TEXT, timeout=0.02)
            assert result.error is not None
            assert result.error.code == ErrorCode.DEADLINE
            await settled(engine)

    run(main())


def test_stage_that_does_not_come_back_fails_who_waits_and_refuses_who_comes() -> None:
    async def main() -> None:
        stages = Fragile()
        async with AsyncOmniEngine(resolve_config("echo3", None, {}), stages) as engine:
            stages.broken.add("wave/0")
            stages.hosts["wave/0"].kill()
            while engine.health().ready:
                await asyncio.sleep(0.001)
            began = asyncio.get_running_loop().time()
            result = await answer(engine, id="waits", prompt=TEXT)
            assert result.error is not None
            assert (result.error.code, result.error.stage) == (ErrorCode.STAGE_DIED, "wave")
            assert asyncio.get_running_loop().time() - began < 2
            with pytest.raises(RequestError) as refused:
                await answer(engine, id="late", prompt=TEXT)
            assert (refused.value.info.code, refused.value.info.stage) == (ErrorCode.UNAVAILABLE, "wave")
            assert refused.value.info.retry_after_s is not None
            assert engine.runtime.of_stage("wave")[0].restarts > PATIENT_FAILURES
            assert (await answer(engine, id="text", prompt=TEXT, modalities=("text",))).text == TEXT
            stages.broken.clear()
            while not engine.health().ready:
                await asyncio.sleep(0.01)
            assert (await answer(engine, id="again", prompt=TEXT)).error is None
            await settled(engine)

    run(main())
