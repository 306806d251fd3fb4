"""
Drives a real AsyncLLM for test_vllm_routes.py, and is the worker extension that its engine process loads:

    python test/routes_driver.py MODELS BLOBS OUT

MODELS holds v0, v1, v2 (one shape, other weights), `aligned` and `dense`. OUT gets JSON: what each request
was given and what came, {name, version, prompt, ids, cached, routes, cuts}, where `cuts` are [count, version]
of the weights that were loaded when it had sampled `count` tokens. Child processes of vLLM import this again.
"""

import asyncio
import json
import os
import random
import sys
from collections.abc import Awaitable
from pathlib import Path
from string import ascii_letters
from typing import Any

os.environ |= {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker lives in the engine process
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "workers")]

from vllm_routes import WANTED, RouteShape, RouteStore, rows_of_take, write_blob  # noqa: E402 vLLM reads the environment when it is imported

BATCHED_TOKENS = 64  # of a step: every prompt below is prefilled in chunks
BLOCKS, BLOCK_SIZE = 40, 32  # room for 1280 tokens: more than the crowd needs at once
VOCAB = 256  # bytes


class RoutesExtension:
    """Mixed into the worker. `molt_test_*` is what these tests need beside the methods of the real one."""

    model_runner: Any

    def molt_routes_install(self) -> dict[str, Any]:
        self.molt_routes = RouteStore(self)
        return self.molt_routes.install()

    def molt_routes_take(self, wanted: dict[str, int]) -> dict[str, bytes]:
        return self.molt_routes.take(wanted)

    def molt_routes_drop(self, requests: list[str]) -> None:
        self.molt_routes.drop(requests)

    def molt_test_collected(self) -> dict[str, int]:
        return {request: collected.length for request, collected in self.molt_routes._collected.items()}

    def molt_test_resumed(self) -> int:
        return self.molt_resumed

    def molt_test_prepare(self) -> None:
        self._count_resumed()
        self._pack_on_reload()

    def _count_resumed(self) -> None:
        """Requests that came back after they had lost their blocks."""
        self.molt_resumed = 0
        execute = self.model_runner.execute_model

        def execute_and_count(scheduled, *args, **kwargs):
            self.molt_resumed += len(scheduled.scheduled_cached_reqs.resumed_req_ids)
            return execute(scheduled, *args, **kwargs)

        self.model_runner.execute_model = execute_and_count

    def _pack_on_reload(self) -> None:
        """vLLM packs CPU experts on the first load only; without this a reload scrambles them."""
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
            UnquantizedFusedMoEMethod,
        )

        setup = UnquantizedFusedMoEMethod._setup_kernel

        def setup_and_pack(self, layer, w13, w2):
            is_update = self.moe_kernel is not None
            setup(self, layer=layer, w13=w13, w2=w2)
            if is_update:
                self.moe_kernel.fused_experts.process_weights_after_loading(layer)

        UnquantizedFusedMoEMethod._setup_kernel = setup_and_pack


def build_engine(model: Path) -> Any:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(model),
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=16,
            max_num_batched_tokens=BATCHED_TOKENS,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=BLOCKS,
            kv_cache_memory_bytes=64 << 20,
            enable_prefix_caching=True,
            disable_log_stats=True,
            generation_config="vllm",
            seed=0,
            worker_extension_cls="routes_driver.RoutesExtension",
        )
    )


class Driver:
    def __init__(self, engine: Any, shape: RouteShape, models: Path, blobs: Path):
        self.engine = engine
        self.shape = shape
        self.models = models
        self.blobs = blobs
        self.version = "v0"
        self.rng = random.Random(0)
        self.records: list[dict[str, Any]] = []
        self.live: dict[str, dict[str, Any]] = {}

    def draw(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(count)]

    async def call(self, method: str, *args: Any) -> Any:
        return (await self.engine.collective_rpc(method, args=args))[0]

    async def request(self, name: str, prompt: list[int], tokens: int, **sampling: Any) -> dict[str, Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = {"temperature": 1.0, "ignore_eos": True, "detokenize": False} | sampling
        params = SamplingParams(
            max_tokens=tokens, output_kind=RequestOutputKind.DELTA, extra_args={WANTED: True}, **params
        )
        ids: list[int] = []
        record = {
            "name": name,
            "prompt": prompt,
            "ids": ids,
            "cached": 0,
            "cuts": [],
            "version": self.version,
        }
        self.live[name] = record
        inputs = {"prompt_token_ids": prompt, "cache_salt": self.version}
        queue = await self.engine.add_request(name, inputs, params)
        while "reason" not in record:
            output = queue.get_nowait() or await queue.get()
            ids += output.outputs[0].token_ids
            record["cached"] = output.num_cached_tokens or record["cached"]
            if output.finished:
                record["reason"] = output.outputs[0].finish_reason
        del self.live[name]
        taken = await self.call("molt_routes_take", {queue.request_id: len(prompt) + len(ids) - 1})
        rows = rows_of_take(taken[queue.request_id], self.shape)
        record["routes"] = await asyncio.to_thread(write_blob, self.blobs, rows, self.shape)
        self.records.append(record)
        return record

    def start(self, name: str, count: int, prompt: int, tokens: int) -> list[asyncio.Task]:
        names = [f"{name}-{i}" for i in range(count)]
        return [asyncio.create_task(self.request(n, self.draw(prompt), tokens)) for n in names]

    async def sampled(self, tokens: int) -> None:
        """Until every live request has that many."""
        while not self.live or min(len(record["ids"]) for record in self.live.values()) < tokens:
            await asyncio.sleep(0.002)

    async def pause(self, clear: bool, load: str | None) -> None:
        await self.engine.pause_generation(mode="keep", clear_cache=clear)
        await asyncio.sleep(0.1)  # outputs on their way arrive
        await self.load(load or self.version)
        for record in self.live.values():
            record["cuts"].append([len(record["ids"]), self.version])
        await self.engine.resume_generation()

    async def load(self, version: str) -> None:
        if version != self.version:
            kwargs = {"weights_path": str(self.models / version)}
            await self.engine.collective_rpc("reload_weights", kwargs=kwargs)
        self.version = version

    # ---- Scenarios ----

    async def prefixes(self) -> None:
        """One beginning three times, the last two at once; then one prompt three times at once."""
        shared = self.draw(200)
        await self.request("prefix-first", shared + self.draw(30), 20)
        await asyncio.gather(
            *(self.request(f"prefix-hit-{i}", shared[: 150 + 40 * i] + self.draw(30), 20) for i in range(2))
        )
        same = self.draw(90)
        await asyncio.gather(*(self.request(f"prefix-same-{i}", same, 20) for i in range(3)))

    async def turns(self) -> None:
        """The second turn's prompt begins with what the first one sampled."""
        first = await self.request("turn-first", self.draw(70), 60)
        await self.request("turn-second", first["prompt"] + first["ids"] + self.draw(25), 30)

    async def pauses(self) -> None:
        for name, clear, load in [
            ("keep-clear", True, None),
            ("keep", False, None),
            ("keep-clear-load", True, "v1"),
            ("keep-load", False, "v2"),
        ]:
            tasks = self.start(name, 4, 50, 80)
            await self.sampled(20)
            await self.pause(clear, load)
            await asyncio.gather(*tasks)

    async def pause_in_prefill(self, name: str, clear: bool, load: str) -> None:
        """A request that has sampled nothing yet, some of whose prompt has run."""
        for wait in range(200):
            task = asyncio.create_task(self.request(f"{name}-{wait}", self.draw(700), 10))
            await asyncio.sleep(0.01 + 0.001 * wait)
            await self.engine.pause_generation(mode="keep", clear_cache=clear)
            [done] = (await self.call("molt_test_collected")).values() or [0]
            is_within = 0 < done < 700
            if is_within:
                [record] = self.live.values()
                record |= {"prefilled": done, "name": name}
                await self.load(load)
                record["cuts"].append([0, load])
            await self.engine.resume_generation()
            record = await task
            if is_within:
                return
            self.records.remove(record)
        raise RuntimeError("no pause fell into the prefill")

    async def crowd(self) -> None:
        """More than the KV cache has room for: some are preempted, blocks are filled again and again."""
        before = await self.call("molt_test_resumed")
        await asyncio.gather(*self.start("crowd", 10, 60, 160))
        self.preempted = await self.call("molt_test_resumed") - before

    async def ends(self) -> None:
        """Ended by others than the engine itself, which has run further or lags behind."""
        await self.request("stop-string", self.draw(40), 200, stop=list(ascii_letters), detokenize=True)
        [task] = self.start("abort", 1, 40, 600)
        await self.sampled(33)
        await self.engine.abort("abort-0")
        await task

    async def unwanted(self) -> None:
        """Nothing is collected for a request that does not ask; what is dropped is gone."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=30, ignore_eos=True, detokenize=False)
        async for _ in self.engine.generate({"prompt_token_ids": self.draw(30)}, params, "unwanted"):
            pass
        params.extra_args = {WANTED: True}
        async for _ in self.engine.generate({"prompt_token_ids": self.draw(30)}, params, "dropped"):
            pass
        left = list(await self.call("molt_test_collected"))
        assert len(left) == 1 and left[0].startswith("dropped"), left
        await self.call("molt_routes_drop", [*left, "never scheduled"])


async def error_of(call: Awaitable[Any]) -> str:
    try:
        await call
    except Exception as error:  # noqa: BLE001 collective_rpc makes every failure a bare Exception
        return str(error)
    return "none"


async def run_scenarios(models: Path, blobs: Path) -> dict[str, Any]:
    engine = build_engine(models / "v0")
    try:
        [shape] = await engine.collective_rpc("molt_routes_install")
        driver = Driver(engine, RouteShape(**shape), models, blobs)
        await driver.call("molt_test_prepare")
        await driver.unwanted()
        await driver.prefixes()
        await driver.turns()
        await driver.ends()
        await driver.crowd()
        await driver.pauses()
        await driver.pause_in_prefill("prefill-clear-load", True, "v0")
        await driver.pause_in_prefill("prefill-load", False, "v1")
        await driver.load("aligned")
        await asyncio.gather(*driver.start("aligned", 3, 100, 40))
        left = await driver.call("molt_test_collected")
        unknown = await error_of(driver.call("molt_routes_take", {"nobody": 3}))
    finally:
        engine.shutdown()
    return {
        "shape": shape,
        "records": driver.records,
        "preempted": driver.preempted,
        "left": left,
        "unknown": unknown,
    }


async def install_refused(model: Path) -> str:
    engine = build_engine(model)
    try:
        return await error_of(engine.collective_rpc("molt_routes_install"))
    finally:
        engine.shutdown()


async def main(models: Path, blobs: Path, out: Path) -> None:
    found = await run_scenarios(models, blobs)
    found["dense"] = await install_refused(models / "dense")
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(*map(Path, sys.argv[1:])))
