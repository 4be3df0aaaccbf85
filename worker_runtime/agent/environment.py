"""What the agent adds to the environment of the processes that it starts.

The token in it is how its guard finds all of them, and whatever they start in turn.
"""

from ...checkpoint_io.settings import VARIABLE, CheckpointSettings
from ...protocol.settings import Settings
from .hang import gloo_limit, stamp_interval
from .options import Options


def helper_environment(options: Options, token: str) -> dict[str, str]:
    """Of a process beside the ranks; of the fork server too, whose initial environment its ranks keep."""
    ours = {"PERDURE_TOKEN": token, "PERDURE_JOB": options.job, "PERDURE_NODE": options.node}
    return {**options.environ, **ours}


def rank_environment(options: Options, settings: Settings, token: str) -> dict[str, str]:
    """The whole environment of a rank, but for what is different for each process.

    settings: the job's, as far as they are known: the first processes are started before a controller has told them.
    """
    env = {
        **helper_environment(options, token),
        "PERDURE_AUTO_STAMP_S": f"{stamp_interval(settings):g}",
        "PERDURE_GLOO_LIMIT_S": f"{gloo_limit(settings):g}",
        "PERDURE_HARD_LIMIT_S": f"{settings.hard_timeout:g}",
        "PERDURE_EMPTY_CUDA_CACHE": "1" if settings.empty_cuda_cache else "0",
    }
    # Whether the job runs in plain text is known by the endpoint beside the keys, when it is needed.
    checkpoints = CheckpointSettings.of(settings, options.node, str(options.run_dir / "keys.json"))
    if checkpoints is None:
        env.pop(VARIABLE, None)  # of a job around this one
    else:
        env[VARIABLE] = checkpoints.text()
    return env
