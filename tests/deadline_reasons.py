"""Lists waits without a deadline that cannot hang, each with its reason, for `tests/test_deadlines.py`."""

from __future__ import annotations

# (file, function) → why it cannot hang. The test fails for unnecessary entries.
REASONS = {
    (
        "relax_core/plan/rehearse.py",
        "run_jobs",
    ): "each thread waits for a child process, which has a deadline",
    # An idle thread or task. Waits for its end have deadlines, and the thread or task ends with its process.
    (
        "relax_core/bus/journal.py",
        "Journal._write_forever",
    ): "a daemon thread at rest; close() joins it with a deadline",
    (
        "relax_core/observe/sample_log.py",
        "SampleLog._write_forever",
    ): "a daemon thread at rest; close() wakes it and joins it with a deadline",
    (
        "relax_core/observe/trackers/prometheus_sink.py",
        "PrometheusSink.close",
    ): "the server looks for it twice a second; the tracker's process, which calls it, is ended at a deadline",
    (
        "relax_core/observe/alarms.py",
        "_ReceiverThread._main",
    ): "a thread at rest, which a message or the run's end wakes; its end is waited for with a deadline",
    (
        "relax_core/observe/trackers/otlp_sink.py",
        "OtlpSink.close",
    ): "closes a connection; no thread and no request is left",
    (
        "relax_core/contracts/child_process.py",
        "end_starter",
    ): "a thread at rest: each start of a sandbox was waited for, with a deadline",
    ("relax_core/observe/event_log.py", "EventWriter._main"): "a daemon thread at rest; close() wakes it",
    (
        "relax_core/engines/embedded/scheduler.py",
        "Scheduler._receive",
    ): "the engine's thread at rest; it alone reads",
    (
        "relax_core/rollout/rewards/reward_audit.py",
        "audit_reward",
    ): "each answer has reward.timeout_s, by the pool, as in a run",
    # A session of an env in a separate task. The call that waits for the task has env.step_timeout_s and ends the task.
    ("envs/tool_servers/mcp_sessions.py", "McpSessions.open"): "reset has the deadline of a call of the env",
    (
        "envs/tool_servers/mcp_sessions.py",
        "McpSessions._hold",
    ): "the sessions at rest; close() wakes it, with a deadline",
    ("envs/tool_servers/mcp_sessions.py", "McpSessions.call"): "step has the deadline of a call of the env",
    (
        "relax_core/server/gateway_server.py",
        "serve",
    ): "the gateway's process at rest; its supervisor ends it by closing its stdin",
    (
        "relax_core/roles/rollout_worker.py",
        "RolloutWorker._run_loops",
    ): "the worker's own work: each of its waits has a deadline, and the task group ends all of them",
    (
        "relax_core/server/order_routes.py",
        "_addresses",
    ): "each address has RESOLVE_S in engine_address, which names it",
    (
        "relax_core/server/engine_order_service.py",
        "_answer_all",
    ): "the thread of orders at rest; the end of `answering` wakes it and joins it with a deadline",
    ("relax_core/server/engine_order_service.py", "_has_left"): "the socket does not block",
    ("relax_core/control/host/agent_on_demand.py", "wait_for_user"): "after select: a connection waits",
    (
        "relax_core/engines/held_port.py",
        "refuse_waiting",
    ): "the listener does not block: without a connection accept() raises at once",
    (
        "relax_core/engines/protocol/server_proof.py",
        "_DeadlineSocket.receive",
    ): "the socket has a timeout of what is left of the call's deadline",
    ("relax_core/train/process_group.py", "OneDeviceGloo._exchange"): "the group's deadline, for each work",
    ("relax_core/control/host/fork_server.py", "serve"): "after select: a connection waits",
    ("relax_core/control/host/worker_start.py", "ask_fork_server"): "the socket has a timeout of FORK_S",
    # The result exists already.
    ("envs/tool_servers/mcp_sessions.py", "McpSessions.close"): "of a task in done",
    ("envs/openenv.py", "OpenEnvEpisode._ask"): "the WebSocket's last error, which it has or has not",
    (
        "relax_core/control/engine_changes.py",
        "EngineChanges._tick_joining",
    ): "after done(): the comparison has ended",
    ("relax_core/roles/rollout_worker.py", "RolloutWorker._evaluate"): "after done(): the task has ended",
    ("relax_core/engines/engine_pool.py", "EnginePool._abort"): "after done(): the calls have ended",
    ("relax_core/engines/engine_states.py", "log_failures"): "a done callback: the calls have ended",
    ("relax_core/roles/trainer/weight_sync.py", "_check"): "given calls that have ended",
    ("relax_core/weights/publisher.py", "WeightPublisher.report"): "after done(): the pushes have ended",
    (
        "relax_core/roles/trainer/critic_trainer.py",
        "CriticTrainer.write_copy",
    ): "after copy_state, which had the back end already",
    (
        "relax_core/roles/trainer/critic_trainer.py",
        "CriticTrainer.accumulate",
    ): "after begin_step, which had the back end already",
    (
        "relax_core/train/checkpoints/checkpoint_shards.py",
        "StoredFolder._filled",
    ): "the reader has read: its future is done",
    (
        "relax_core/roles/trainer/reference_logprobs.py",
        "ForwardWorker._end",
    ): "flushes the log's file: no other process",
    ("relax_core/roles/trainer/rank_worker.py", "RankWorker._failures"): "the same",
    # The responding side has deadlines and ends this wait also on failure.
    (
        "relax_core/rollout/episodes/group_player.py",
        "GroupPlayer._end_stragglers",
    ): "episodes of the group: each request and each call of an env has a deadline",
    # `AgentHost.played` has the deadlines of an attempt and cancels these waits. A guard ends its agent within GRACE_S
    # plus a limit of the guard, and a separate task waits for this end.
    (
        "relax_core/rollout/agent_processes/agent_process.py",
        "AgentProcess.wait",
    ): "the guard has the deadline for its agent's end",
    (
        "relax_core/rollout/agent_processes/one_shot_agents.py",
        "OneShotAgentRunner.play",
    ): "AgentHost.played cancels it behind agent.timeout_s",
    (
        "relax_core/rollout/agent_processes/one_shot_agents.py",
        "OneShotAgentRunner._end",
    ): "the guard was asked to end its agent, and has the deadline",
    (
        "relax_core/rollout/agent_processes/one_shot_agents.py",
        "OneShotAgentRunner.aclose",
    ): "the same",
    (
        "relax_core/rollout/agent_processes/agent_worker_pool.py",
        "AgentWorkerPool.play",
    ): "a process becomes free when the attempt ends that has it, which has a deadline",
    (
        "relax_core/rollout/agent_processes/agent_worker_pool.py",
        "AgentWorkerPool._answer",
    ): "AgentHost.played cancels it behind agent.timeout_s, _give_back behind the grace",
    (
        "relax_core/rollout/agent_processes/agent_worker_pool.py",
        "AgentWorkerPool._give_back",
    ): "the guard was asked to end its agent, and has the deadline",
    (
        "relax_core/rollout/agent_processes/agent_worker_pool.py",
        "AgentWorkerPool.aclose",
    ): "the same",
    (
        "relax_core/rollout/agents/agent_host.py",
        "AgentHost.played",
    ): "after done(): the attempt has ended",
    (
        "relax_core/rollout/agents/agent_host.py",
        "_until",
    ): "asyncio.wait beside it has the deadline; without one, an engine holds the first answer and has its own",
    (
        "relax_core/rollout/agents/external_agents.py",
        "ExternalAgents.play",
    ): "an attempt at rest until an agent asks for it; the run's stall_timeout_s tells when none does",
    (
        "relax_core/rollout/episodes/shared_requests.py",
        "Lockstep.run",
    ): "episodes of the prompt batch: each request and each call of an env has a deadline",
    (
        "relax_core/engines/engine_pool.py",
        "EnginePool.generate",
    ): "each share ends with None or its error within timeout_s",
    (
        "relax_core/engines/sglang/sglang_client.py",
        "SglangClient.generate",
    ): "each wave ends with None or its error: holding and streaming have the longest silence",
    (
        "relax_core/engines/embedded/generate_route.py",
        "GenerateRoute._whole",
    ): "ends with the samples, the failure of the scheduler or the client's hang-up; the client has a longest silence",
    ("relax_core/engines/embedded/generate_route.py", "GenerateRoute._frames"): "the same",
    ("relax_core/engines/embedded/generate_route.py", "GenerateRoute._events"): "the same",
    ("relax_core/weights/weight_group.py", "WeightGroup._broadcast"): "the group was made with a deadline",
    ("relax_core/train/hf/hf_weights.py", "_run"): "the trainer's group was made with a deadline",
    ("relax_core/engines/engine_states.py", "fan_out"): "each call has its engine client's deadlines",
    ("relax_core/control/engine_changes.py", "EngineProbe._compare"): "the same",
    (
        "relax_core/rollout/item_cache.py",
        "ItemCache.items",
    ): "each encoding ends within MediaLimits.worker_timeout_s, and the bus's call within its own",
    ("relax_core/rollout/rollout_loop.py", "PromptAdmissions._make"): "the same",
    ("relax_core/rollout/feeder_loop.py", "FeederLoop._feed"): "the same",
    ("relax_core/rollout/evaluator.py", "prepare_with_media"): "the same",
    (
        "relax_core/rollout/evaluator.py",
        "Evaluator.gate",
    ): "run() sets it or fails, and its task group ends this one",
    (
        "relax_core/rollout/rewards/reward_pool.py",
        "RewardPool._outcomes",
    ): "the parts of a sum, each of which is as the next",
    (
        "relax_core/rollout/rewards/reward_pool.py",
        "RewardPool._calls_of",
    ): "each call ends within reward.timeout_s an answer, or the watch ends the run",
    (
        "relax_core/tools/score.py",
        "_scored",
    ): "the reward pool has the deadlines",
    (
        "relax_core/rollout/judges/judge_pool.py",
        "judge_accuracy",
    ): "each answer is scored within reward.timeout_s",
    (
        "relax_core/rollout/rewards/answer_process.py",
        "scored_alone",
    ): "the owner of the worker kills it, and with it this child, after reward.timeout_s",
    ("rewards/genrm.py", "_pairwise"): "each verdict comes within its judge's timeout_s",
    ("rewards/genrm.py", "_rubric"): "the same",
    (
        "relax_core/rollout/rollout_loop.py",
        "RolloutLoop._sample",
    ): "its groups wait for engines, envs, rewards and the bus, which have deadlines",
    (
        "relax_core/rollout/episodes/group_player.py",
        "GroupPlayer._together",
    ): "its groups wait for engines and envs, which have deadlines",
    (
        "relax_core/rollout/rollout_loop.py",
        "RolloutLoop._finish",
    ): "the group before it ends as this one does, and the prompt batch's task group ends both",
    (
        "relax_core/rollout/episodes/episode_player.py",
        "EpisodePlayer._play",
    ): "set to env.episode_timeout_s at the first response; the engine's pool bounds the time before",
    ("relax_core/rollout/evaluator.py", "play_sets"): "after the task group: the tasks have ended",
    ("relax_core/rollout/episodes/episode_player.py", "EpisodePlayer.opened"): "each close has env.step_timeout_s",
    (
        "relax_core/rollout/episodes/env_calls.py",
        "EnvCalls.close.close_later",
    ): "a daemon thread for which nobody waits: it closes an env when the call that was left behind has ended",
    (
        "relax_core/rollout/env_workers/env_workers.py",
        "EnvWorkers._take_place",
    ): "a group that has its places waits for no other, and its episodes end within env.episode_timeout_s",
    (
        "relax_core/rollout/env_workers/env_worker.py",
        "EnvWorker.stop",
    ): "the process was just killed, which ends the thread's wait for it",
    (
        "relax_core/data/media/encode_pool.py",
        "EncodePool.close",
    ): "the workers are killed, which ends each thread's wait for one",
    (
        "relax_core/rollout/rewards/reward_pool.py",
        "RewardPool.close",
    ): "its threads wait for workers that were just killed",
    ("relax_core/cli/eval_command.py", "eval_engines"): "each start ends within engine.start_timeout_s",
    (
        "relax_core/roles/trainer/critic_trainer.py",
        "CriticTrainer._run",
    ): "the model's own thread computes; the lead's call has a deadline",
    (
        "relax_core/engines/embedded/half_products.py",
        "pack_all",
    ): "its threads compute; who updates the weights has a deadline",
    (
        "relax_core/control/model_folders.py",
        "making_models",
    ): "makes or finds model folders: file work, no other process",
    ("relax_core/control/local_run.py", "_in_session"): "the same",
    ("relax_core/control/services.py", "Services.__init__"): "a bus starts, answers and restores within deadlines",
    # TransferQueue: the coroutine of a call has a deadline, and callers wait for the coroutine.
    ("relax_core/bus/transfer_queue_plane.py", "PlaneClient._guarded"): "after done(): the task has ended",
    ("relax_core/bus/transfer_queue_plane.py", "PlaneClient.get"): "runs inside of _guarded()",
    (
        "relax_core/bus/transfer_queue_plane.py",
        "PlaneClient.close",
    ): "the loop was told to stop, nothing runs in it",
    (
        "relax_core/bus/transfer_queue_bus.py",
        "TransferQueueBusActor._watch",
    ): "a task that waits for a death",
    ("relax_core/bus/transfer_queue_bus.py", "TransferQueueBusActor._clear_freed"): "a task at rest",
    (
        "relax_core/bus/transfer_queue_bus.py",
        "TransferQueueBusActor._tidy",
    ): "the call takes its deadline along; a task of its own, for which nobody waits",
    (
        "relax_core/bus/transfer_queue_plane.py",
        "_Host.stay",
    ): "never returns: its failure tells that the process died",
}
