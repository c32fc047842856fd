"""Count from which chunk on a rollout does the same work on the same memory."""

from kv_rollout.geometry import ar_chunk_plan, ar_chunk_range
from kv_rollout.setup import RolloutSetup


def count_warmup_chunks(setup: RolloutSetup) -> int:
    """Return the first chunk from which shapes, branches and the shape of memory repeat.

    Two chunks do the same work when they have as many frames, remember as many control frames
    first, and find as many valid frames in every slot. The chunks are walked until memory is full;
    the last chunk of the clip, which is not committed and may be short, does not count. A memory
    that grows until the end never repeats: the result is then the last chunk.
    """
    geometry, memory = setup.geometry, setup.memory
    count = ar_chunk_plan(geometry).count
    if not memory.streaming:
        return count - 1
    walked = min(count - 1, memory.control_slots + memory.history_slots + 2)
    control = [0] * memory.control_slots
    history = [0] * memory.history_slots
    reach = controls = 0
    frame = geometry.condition_frames
    work = []
    for index in range(walked):
        start, end = _range(setup, frame)
        topped_up = []
        while reach < end:
            first, reach = _range(setup, reach)
            control[controls % len(control)] = reach - first
            controls += 1
            topped_up.append(reach - first)
        work.append((end - start, tuple(topped_up), tuple(control), tuple(history)))
        history[index % len(history)] = end - start
        frame = end
    steady = len(work) - 1
    while steady > 0 and work[steady - 1] == work[-1]:
        steady -= 1
    return steady if len(work) - steady >= 2 else count - 1


def _range(setup: RolloutSetup, frame: int) -> tuple[int, int]:
    frames = ar_chunk_range(setup.geometry, frame)
    assert frames is not None
    return frames
