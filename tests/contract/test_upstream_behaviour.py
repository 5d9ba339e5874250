"""What upstream's functions do that we rely on: a release that changed it fails here first.

Each test runs one of verl 0.9.1's or SGLang's own functions on small stand-ins; its
docstring names the modules of ours that rely on it. What a test with a real engine would notice is
not here; names and signatures are in `test_upstream_surface`.
"""

import asyncio
import contextlib
import importlib
import inspect
import pickle
import pkgutil
import time
from collections import defaultdict
from types import SimpleNamespace
from unittest.mock import AsyncMock, MagicMock, patch

import pytest
import torch

from sglang_loader.upstream import facts_of, with_facts, without_cpu_backup
from support.messages import message
from verl_sglang_sync.verl.upstream import (
    SEPARATE_ASYNC,
    log_without_flush,
    pause_by_aborting,
    waits_before_kv_cache,
)

MANAGERS = "sglang.srt.managers"
IO = f"{MANAGERS}.io_struct"
TOKENIZER = f"{MANAGERS}.tokenizer_control_mixin:TokenizerControlMixin"
RUNNER = "sglang.srt.model_executor.model_runner"


def original(symbol):
    """An upstream function, without our hooks where this process has applied them."""
    return inspect.unwrap(pkgutil.resolve_name(symbol))


@pytest.fixture(autouse=True)
def settings():
    """A server's arguments, which SGLang reads from the process, from 0.5.16 on."""
    from sglang.srt import runtime_context

    if not hasattr(runtime_context.RuntimeContext, "override_server_args"):
        yield
        return
    with runtime_context.get_context().override_server_args(enable_weights_cpu_backup=True):
        yield


def placed(**values):
    """This process's place among the ranks, for which SGLang asks the process from 0.5.20 on."""
    with contextlib.suppress(ImportError):
        from sglang.srt.runtime_context import SpawnRanks, get_parallel

        assert SpawnRanks
        return get_parallel().override(**values)
    return contextlib.nullcontext()


class TestVerl:
    def test_worker_takes_the_stages_in_our_order(self, monkeypatch):
        """For `verl_sglang_sync.verl.rollout` and `verl_sglang_sync.routes.staging_ring`:
        expandable segments, which cannot be shared, are off meanwhile."""
        module = importlib.import_module("verl.workers.engine_workers")
        steps = []
        rollout = SimpleNamespace(sleep_level=2, resume=AsyncMock(), update_weights=AsyncMock())
        rollout.resume.side_effect = lambda tags: steps.append(tags)
        rollout.update_weights.side_effect = lambda weights, **_: steps.append(weights)
        worker = MagicMock(rollout=rollout, peft_merge=False)
        worker.config.rollout.get = {"name": "sglang"}.get
        worker.actor.engine.get_per_tensor_param.return_value = ("export", None)
        monkeypatch.setattr(module, "set_expandable_segments", lambda on: steps.append(on))
        for name in ("get_torch_device", "log_gpu_memory_usage"):
            monkeypatch.setattr(module, name, MagicMock())
        monkeypatch.setattr(torch.distributed, "barrier", lambda: steps.append("barrier"))
        update = original("verl.workers.engine_workers:ActorRolloutRefWorker.update_weights")
        asyncio.run(update(worker, global_steps=1, mode="naive"))
        wait = ["barrier"] if waits_before_kv_cache() else []
        assert steps == [False, ["weights"], "export", *wait, ["kv_cache"], True]

    @pytest.mark.parametrize("verl_waits", [True, False])
    @pytest.mark.parametrize("tag", ["weights", "kv_cache"])
    def test_kv_cache_resumes_after_all_ranks_freed_memory(self, tag, verl_waits, monkeypatch):
        """For `verl_sglang_sync.verl.rollout`: with a verl that does not wait, ours does."""
        from verl_sglang_sync.verl import rollout as module

        steps = []
        monkeypatch.setattr(torch.distributed, "barrier", lambda: steps.append("barrier"))
        monkeypatch.setattr(module, "waits_before_kv_cache", lambda: verl_waits)
        manager = MagicMock(report=MagicMock(seconds={}), resume=AsyncMock())
        manager.resume.side_effect = lambda tags: steps.append(tags)
        manager.take_written.return_value = None
        rollout = object.__new__(module.WeightSyncRollout)
        rollout._settings, rollout._engine = "a preset's", None
        rollout._sharding_manager = AsyncMock(return_value=manager)
        asyncio.run(rollout.resume([tag]))
        waits = tag == "kv_cache" and not verl_waits
        assert steps == [*(["barrier"] if waits else []), [tag]]

    def test_separate_async_trainer_starts_at_default_log_level(self, monkeypatch, caplog):
        """For `verl_sglang_sync.verl.upstream`: verl alone dies of its own line."""
        module = importlib.import_module(SEPARATE_ASYNC)
        if "flush=True" not in inspect.getsource(module):
            pytest.skip("this release of verl does not log in that way")
        trainer = object.__new__(module.PPOTrainerSeparateAsync)
        trainer._enable_hybrid_replicas = False
        for name in ("config", "llm_server_manager", "actor_rollout_wg"):
            setattr(trainer, name, MagicMock(rollout_replicas=[]))
        for name in ("LLMServerManager", "CheckpointEngineManager", "omega_conf_to_dataclass"):
            monkeypatch.setattr(module, name, MagicMock())
        monkeypatch.setattr(module, "update_prometheus_config", MagicMock())
        monkeypatch.setattr(module.PPOTrainer, "_setup", lambda self: None)
        vars(module.logger).pop("info", None)
        with pytest.raises(TypeError, match="flush"):
            trainer._setup()
        log_without_flush()
        trainer._setup()
        (line,) = (record for record in caplog.records if record.name == SEPARATE_ASYNC)
        assert line.message.startswith("[V1SepAsync] hybrid replicas disabled")
        assert line.filename == "trainer_separate_async.py"


class TestTokenizerProcess:
    @pytest.mark.parametrize("is_ours", [True, False])
    def test_pause_ends_what_runs(self, is_ours):
        """For `verl_sglang_sync.verl.upstream`: ours does what SGLang's does, without its wait."""
        from sglang.srt.utils.aio_rwlock import RWLock

        async def pause():
            aborted, events = asyncio.Event(), []
            manager = MagicMock(is_pause=False, is_pause_cond=asyncio.Condition())
            manager.model_update_lock = RWLock()
            manager.abort_request = lambda abort_all: aborted.set()

            async def request():
                async with manager.model_update_lock.reader_lock:
                    await aborted.wait()
                    await asyncio.sleep(0.05)  # the scheduler ends its step
                    events.append("ended")

            running = asyncio.create_task(request())
            await asyncio.sleep(0)
            started = time.perf_counter()
            if is_ours:
                await pause_by_aborting(manager, timeout_s=20)
            else:
                own = original(f"{MANAGERS}.tokenizer_manager:TokenizerManager.pause_generation")
                await own(manager, SimpleNamespace(mode="abort"))
            events.append(f"paused {manager.is_pause}")
            await running
            return events, time.perf_counter() - started

        events, seconds = asyncio.run(pause())
        assert events == ["ended", "paused True"]
        # SGLang sleeps for 1 s. uvloop counts in whole milliseconds and may end a sleep early.
        assert seconds < 0.8 if is_ours else seconds > 0.9

    def test_an_unending_request_is_named_after_the_limit(self):
        """For `verl_sglang_sync.verl.upstream`: later requests begin again."""
        from sglang.srt.utils.aio_rwlock import RWLock

        async def pause():
            manager = MagicMock(is_pause=False, is_pause_cond=asyncio.Condition())
            manager.model_update_lock = RWLock()
            manager.rid_to_state = {f"rollout-{number}": None for number in range(12)}

            async def later():
                async with manager.is_pause_cond:
                    await manager.is_pause_cond.wait_for(lambda: not manager.is_pause)

            async with manager.model_update_lock.reader_lock:
                pausing = asyncio.create_task(pause_by_aborting(manager, timeout_s=0.3))
                await asyncio.sleep(0.1)
                waiting = asyncio.create_task(later())
                with pytest.raises(TimeoutError, match=r"0\.3 s .*rollout-0, .* and 2 more"):
                    await asyncio.wait_for(pausing, 10)
                await asyncio.wait_for(waiting, 10)

        asyncio.run(pause())

    @pytest.mark.parametrize("is_abort", [True, False])
    def test_a_request_aborted_by_a_pause_before_running(self, is_abort, monkeypatch):
        """For `verl_sglang_sync.verl.replica`: SGLang 0.5.17 raises then, the others do not."""
        manager = importlib.import_module(f"{MANAGERS}.tokenizer_manager")
        aborted = getattr(manager, "RequestAbortedError", None)
        if is_abort and aborted is None:
            aborted = type("RequestAbortedError", (ValueError,), {})
        from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

        from verl_sglang_sync.verl.replica import WeightSyncHttpServer

        error = aborted("said") if is_abort else ValueError("said")
        monkeypatch.setattr(SGLangHttpServer, "generate", AsyncMock(side_effect=error))
        server = object.__new__(WeightSyncHttpServer)
        server.global_steps = 7
        if not is_abort:
            with pytest.raises(ValueError, match="said"):
                asyncio.run(server.generate([1], {}, "a"))
            return
        answer = asyncio.run(server.generate([1], {}, "a"))
        assert (answer.token_ids, answer.stop_reason) == ([], "abort")
        assert answer.extra_fields == {"global_steps": 7}

    @pytest.mark.parametrize("is_taken", [True, False])
    def test_a_request_to_an_engine_taken_by_trainer(self, is_taken, monkeypatch):
        """For `verl_sglang_sync.verl.replica`: verl's client asks another server after an abort."""
        from fastapi import HTTPException
        from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

        from sglang_loader.common.engine_settings import TAKEN_BY_TRAINER
        from verl_sglang_sync.verl.replica import WeightSyncHttpServer

        reason = TAKEN_BY_TRAINER if is_taken else "the weights are half"
        error = HTTPException(503, detail=f"not served: {reason}")
        monkeypatch.setattr(SGLangHttpServer, "generate", AsyncMock(side_effect=error))
        server = object.__new__(WeightSyncHttpServer)
        server.global_steps = 7
        if not is_taken:
            with pytest.raises(HTTPException):
                asyncio.run(server.generate([1], {}, "a"))
            return
        answer = asyncio.run(server.generate([1], {}, "a"))
        assert (answer.token_ids, answer.stop_reason) == ([], "abort")
        assert answer.extra_fields == {"global_steps": None}, "no token, no version"

    def test_a_server_refuses_between_pause_and_resume(self):
        """For `verl_sglang_sync.verl.replica`: what the pause has held is refused as well."""
        from sglang.srt.utils.aio_rwlock import RWLock

        from verl_sglang_sync.verl.replica import WeightSyncHttpServer

        async def run():
            events, manager = [], MagicMock(is_pause=False, is_pause_cond=asyncio.Condition())
            manager.model_update_lock = RWLock()

            async def stage(request, _):
                name = type(request).__name__.partition("Memory")[0]
                events.append((name, request.tags, f"paused {manager.is_pause}"))

            manager.release_memory_occupation = manager.resume_memory_occupation = stage
            manager.continue_generation = AsyncMock()

            async def held():
                async with manager.is_pause_cond:
                    await manager.is_pause_cond.wait_for(lambda: not manager.is_pause)
                events.append("goes on")

            server = object.__new__(WeightSyncHttpServer)
            server.node_rank, server.tokenizer_manager = 0, manager
            settings = SimpleNamespace(request_timeout_s=5)
            with patch.object(WeightSyncHttpServer, "_settings", settings):
                await server.abort_all_requests()
                waiting = asyncio.create_task(held())
                await asyncio.sleep(0)
                await server.refuse_requests()
                await asyncio.wait_for(waiting, 5)
                await server.abort_all_requests()
                events.append(f"paused {manager.is_pause}")
                await server.refuse_requests()
                await server.resume_generation()
                await server.resume_generation()
            return events

        refuse = ("Release", ["requests"], "paused True")
        assert asyncio.run(run()) == [
            refuse,
            "goes on",
            ("Resume", ["requests"], "paused True"),
            "paused True",
            refuse,
            ("Resume", ["requests"], "paused False"),
        ]

    @pytest.mark.parametrize("has_preset", [True, False])
    @pytest.mark.parametrize("rejects", [True, False])
    def test_a_replica_rejects_where_a_preset_is_chosen(self, has_preset, rejects, caplog):
        """For `verl_sglang_sync.verl.replica`: verl's own ignores it with a warning."""
        from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangReplica

        from verl_sglang_sync.verl.replica import WeightSyncReplica

        takes_it = len(inspect.signature(SGLangReplica.abort_all_requests).parameters) > 1
        if rejects and not has_preset and not takes_it:
            pytest.skip("this release of verl does not reject")
        replica, server = object.__new__(WeightSyncReplica), MagicMock()
        for name in ("abort_all_requests", "refuse_requests"):
            getattr(server, name).remote = AsyncMock()
        replica.servers = [server]
        replica.config = {
            "custom": {"weight_sync": {"mode": "compiled"}} if has_preset else {},
            "checkpoint_engine": {"update_weights_bucket_megabytes": 64},
            "multi_stage_wake_up": True,
            "free_cache_engine": True,
        }
        asyncio.run(replica.abort_all_requests(reject_request=rejects))
        server.abort_all_requests.remote.assert_awaited_once_with()
        assert server.refuse_requests.remote.await_count == (has_preset and rejects)
        assert ("ignores reject_request" in caplog.text) == (rejects and not has_preset)

    @pytest.mark.parametrize("name", ["release_memory_occupation", "resume_memory_occupation"])
    def test_stage_is_no_more_than_we_repeat(self, name):
        """For `sglang_loader.hooks.http`:
        we do these two steps in its place, to see the replies."""
        manager, communicator = MagicMock(), AsyncMock()
        manager.attach_mock(communicator, f"{name}_communicator")
        asyncio.run(original(f"{TOKENIZER}.{name}")(manager, "request"))
        steps = [(called, args) for called, args, _ in manager.mock_calls]
        assert steps == [
            ("auto_create_handle_loop", ()),
            (f"{name}_communicator", ("request",)),
        ]

    @pytest.mark.parametrize("generates", [True, False])
    def test_health_check(self, generates, monkeypatch):
        """For `verl_sglang_sync.verl.replica`: a router's checks can be kept from generating."""
        from sglang.srt.entrypoints import http_server

        from verl_sglang_sync.verl.replica import HEALTH_GENERATES

        manager = MagicMock(gracefully_exit=False, last_receive_tstamp=float("inf"))
        monkeypatch.setenv(HEALTH_GENERATES, str(generates).lower())
        monkeypatch.setattr(http_server, "_global_state", MagicMock(tokenizer_manager=manager))
        request = SimpleNamespace(url=SimpleNamespace(path="/health"))
        assert asyncio.run(http_server.health_generate(request)).status_code == 200
        assert manager.generate_request.called is generates


class TestScheduler:
    @pytest.mark.parametrize(
        "abort", [{"rid": "a"}, {"rid": "ab"}, {"rid": "x", "abort_all": True}]
    )
    def test_aborts_reach_the_same_requests_as_ours(self, abort):
        """For `sglang_loader.hooks.request_gate`:
        we abort what is held back as the scheduler aborts what it has queued."""
        from sglang.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput

        from sglang_loader.hooks.request_gate import RequestGate

        to_abort = AbortReq(**abort)
        queued = [
            MagicMock(rid=rid, mamba_pool_idx=None, weight_version_events=[], output_ids=[])
            for rid in ("a", "abc", "b")
        ]
        for request in queued:
            request.kv.holds_mamba = False
        scheduler = MagicMock(chunked_req=None, waiting_queue=[*queued], cur_batch=None)
        scheduler.running_batch.reqs = []
        original(f"{MANAGERS}.scheduler:Scheduler.abort_request")(scheduler, to_abort)
        channels, held = MagicMock(), []
        gate = RequestGate(600.0, channels)
        for request in queued:
            held.append(message(TokenizedGenerateReqInput, rid=request.rid))
        gate.set("asleep")
        gate.let_through(held)
        assert gate.let_through([to_abort]) == [to_abort]
        gate.set(None)
        left = [request.rid for request in gate.let_through([])]
        answers = [call.args[0] for call in channels.send_to_tokenizer.send_output.mock_calls]
        assert {answer.rid for answer in answers} == {"a", "abc", "b"} - {*left}
        assert all(type(each) is AbortReq and not each.finished_reason for each in answers)
        assert left == [request.rid for request in scheduler.waiting_queue] != ["a", "abc", "b"]

    @pytest.mark.parametrize("pickles", [True, False])
    @pytest.mark.parametrize("kind", ["ReleaseMemoryOccupation", "UpdateWeightsFromTensor"])
    def test_replies_travel_with_what_we_tell(self, kind, pickles, monkeypatch):
        """For `sglang_loader.upstream`: we tell more than upstream's replies have fields for."""
        from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper

        io = importlib.import_module(IO)
        if not pickles and not hasattr(io, "_USE_PICKLE_IPC"):
            pytest.skip("this SGLang pickles all messages")
        monkeypatch.setattr(io, "_USE_PICKLE_IPC", pickles, raising=False)
        reply = message(getattr(io, f"{kind}ReqOutput"))
        if kind.startswith("Update"):
            reply.success, reply.message = True, "Success"
        reply, socket = with_facts(with_facts(reply, closed=None), refusal="why"), MagicMock()
        SenderWrapper(socket).send_output(reply, recv_obj=MagicMock(http_worker_ipc=None))
        if pickles:
            (sent,) = socket.send_pyobj.call_args.args
            received = pickle.loads(pickle.dumps(sent))
        else:
            received = io.msgpack_decode(socket.send.call_args.args[0])
        assert facts_of(received) == {"closed": None, "refusal": "why"}
        assert isinstance(received, getattr(io, f"{kind}ReqOutput"))

    def test_memory_tags(self):
        """For `verl_sglang_sync.stages` and `sglang_loader.hooks.memory`."""
        from sglang.srt.constants import GPU_MEMORY_ALL_TYPES

        from sglang_loader.hooks.memory import RELEASE_ORDER, RESUME_ORDER
        from verl_sglang_sync.stages import CUDA_GRAPH, KV_CACHE, WEIGHTS

        for ours in ((KV_CACHE, WEIGHTS, CUDA_GRAPH), RELEASE_ORDER, RESUME_ORDER):
            assert set(ours) == set(GPU_MEMORY_ALL_TYPES)


class TestMemory:
    @pytest.mark.parametrize("backup", [True, False])
    def test_load_model_reads_the_backup_argument(self, backup, monkeypatch):
        """For `sglang_loader.upstream`: we switch it off around this call."""
        module = importlib.import_module(RUNNER)
        for name in (
            *("get_available_gpu_memory", "ModelOptConfig", "LoadConfig"),
            *("build_load_config", "maybe_enable_ipc_weight_cache", "set_cuda_arch"),
            "maybe_trigger_remote_instance_nccl_send_group",
        ):
            monkeypatch.setattr(module, name, MagicMock(return_value=0), raising=False)
        runner = MagicMock(device="none", is_draft_worker=False)
        runner.server_args.enable_weights_cpu_backup = True
        runner.server_args.weight_cache_mode = "off"
        runner.memory_saver_adapter.region.side_effect = InterruptedError  # far enough
        off = contextlib.nullcontext() if backup else without_cpu_backup(runner)
        with placed(tp_rank=0, pp_rank=0), off, pytest.raises(InterruptedError):
            original(f"{RUNNER}:ModelRunner.load_model")(runner)
        region = runner.memory_saver_adapter.region.call_args
        assert (region.args, region.kwargs) == (("weights",), {"enable_cpu_backup": backup})

    @pytest.mark.parametrize("is_set", [True, False])
    def test_graphs_are_captured_under_their_tag(self, is_set, monkeypatch):
        """For `verl_sglang_sync.verl.replica` and `sglang_loader.hooks.memory`:
        we set the variable, release the tag, and measure the pool."""
        from sglang.srt.model_executor.runner_backend import full_cuda_graph_backend as module

        from sglang_loader.common.engine_settings import CUDA_GRAPH_TAG, GRAPHS_VARIABLE

        monkeypatch.setenv(GRAPHS_VARIABLE, str(is_set).lower())
        saver, runner = MagicMock(), MagicMock()
        saver.create.side_effect = lambda enable: MagicMock(enabled=enable)
        monkeypatch.setattr(module, "TorchMemorySaverAdapter", saver)
        monkeypatch.setattr(module, "set_graph_pool_id", MagicMock())
        shared = "get_or_create_global_graph_memory_pool"  # one for all graphs, from 0.5.15 on
        monkeypatch.setattr(module, shared, lambda gpu: gpu.graph_pool_handle(), raising=False)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", MagicMock())
        with placed(tp_group=MagicMock()):
            backend = module.FullCudaGraphBackend(runner, enable_memory_saver=True)
        with backend.capture_session(MagicMock()):
            backend.capture_one("shape", MagicMock())
        assert backend._pool is runner.device_module.graph_pool_handle.return_value
        captures = backend._memory_saver_adapter.cuda_graph.call_args_list
        assert [call.kwargs["tag"] for call in captures] == [CUDA_GRAPH_TAG] * is_set
        assert all(call.kwargs["pool"] is backend._pool for call in captures)

    def test_pools_by_tag_and_backup(self, monkeypatch):
        """For `sglang_loader.host_backup.allocations`: we list the memory saver's own pools."""
        from torch_memory_saver import entrypoint, torch_memory_saver

        from sglang_loader.host_backup import allocations

        segment = {"total_size": 4, "device": 0}
        pool = SimpleNamespace(snapshot=lambda include_traces: [segment])
        saver = object.__new__(entrypoint._TorchMemorySaverImpl)
        saver._is_xpu, saver._mem_pools = False, defaultdict(lambda: pool)
        for name in ("_device_module", "_binary_wrapper", "_with_region_config"):
            setattr(saver, name, MagicMock())
        monkeypatch.setattr(torch_memory_saver, "_impl", saver)
        for tag, backup in (("weights", True), ("weights", False), ("kv_cache", False)):
            with torch_memory_saver.region(tag, enable_cpu_backup=backup):
                pass
        assert allocations.nbytes_under("weights", 0) == 8
        assert allocations.nbytes_under("weights", 0, on_host=True) == 4
        assert allocations.enumeration_problem() is None
