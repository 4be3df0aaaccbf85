"""Every knob of a job: frozen, checked once before anything starts, and sent to each agent in `Welcome`.

Only what all processes of a job must agree on is here. How a knob is written, and which values it allows, is in
`knobs.py`; what must hold between knobs is in `settings_rules.py`. The names are Megatron Bridge's where it has one.
"""

import math

import msgspec

OFF = math.inf
"""The value of a time limit that is switched off: nothing takes longer, so comparisons need no special case."""


class Settings(msgspec.Struct, frozen=True):
    """The effective configuration. Times are in seconds; None means no limit (`active_world_size`: every rank).

    granularity: whether a dead rank takes its `node` out of the plan, or only the `rank`.
    active_world_size: ranks that run; the others are warm reserves. The job shrinks below it, in steps of
    `world_size_multiple_of` and down to `min_world_size`, when reserves are used up.
    max_iterations: rounds in all. max_rank_faults: faults of ranks in all. Both outlast restarts of the controller.
    soft_timeout, hard_timeout: without progress for so long, a rank is interrupted in place, or killed.
    heartbeat_interval, heartbeat_timeout: between agent and controller.
    barrier_timeout: for a rank to come to the gate after the round ended; then it is killed.
    completion_timeout: for the others, once the first rank's function has returned.
    forming_timeout: for all agents and ranks to be there. startup_timeout: for a new process to reach the gate.
    controller_timeout: for an agent to be without a controller; then it ends its ranks.
    termination_grace_time: for ranks to leave the function by `should_stop`; between SIGTERM and SIGKILL.
    last_call_wait: for concurrent faults, while evidence is incomplete.
    respawn: a new process takes the slot of a dead one. observe_only: what the detectors find is logged, not acted on.
    empty_cuda_cache: between two rounds. monitor_process_logdir: where agents keep a copy of the logs, None: nowhere.

    Checkpoints. save: the durable tier's folder, None: none. save_interval: steps between two saves there.
    most_recent_k: so many published saves are kept, None: all. ckpt_step: resume from this step, and no other.
    async_save: the training thread does not wait for the disk. on_busy: `skip` a save that is due while both buffers
    are being written, or `wait`. save_timeout: for one save to become durable.
    non_persistent_local_ckpt_dir: the local tier's folder, None: none. non_persistent_save_interval: steps between two
    saves there. non_persistent_local_ckpt_algo: each rank keeps its share (`fully_parallel`) or all it has (`atomic`).
    replication: other nodes that each hold a copy of a node's local shards.
    """

    granularity: str = "node"
    active_world_size: int | None = None
    min_world_size: int = 1
    world_size_multiple_of: int = 1
    max_iterations: int | None = None
    max_rank_faults: int | None = None
    soft_timeout: float = 60.0
    hard_timeout: float = 90.0
    heartbeat_interval: float = 30.0
    heartbeat_timeout: float = 60.0
    barrier_timeout: float = 120.0
    completion_timeout: float = 120.0
    forming_timeout: float = 600.0
    startup_timeout: float = 600.0
    controller_timeout: float = 600.0
    termination_grace_time: float = 1.0
    last_call_wait: float = 1.0
    respawn: bool = True
    observe_only: bool = False
    empty_cuda_cache: bool = True
    monitor_process_logdir: str | None = None
    save: str | None = None
    save_interval: int | None = None
    most_recent_k: int | None = None
    ckpt_step: int | None = None
    ckpt_format: str = "torch_dist"
    async_save: bool = True
    on_busy: str = "skip"
    save_timeout: float = 600.0
    non_persistent_local_ckpt_dir: str | None = None
    non_persistent_save_interval: int | None = None
    non_persistent_local_ckpt_algo: str = "fully_parallel"
    replication: int = 0
