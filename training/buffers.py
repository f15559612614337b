"""What a replay buffer needs besides replay: its memory, lengths that few CUDA graphs serve, saving and resuming."""

from training import checkpoints
from training.episodes import CHUNK, round_up

MAX_GRAPHS = 8  # CUDA graphs of an update at most, one for each length of a batch


def allocate(episodes, count, device):
    """Room for so many episodes like those of a runner, by name: (rows, count, ...)."""
    shapes = {name: (len(values), count, *values.shape[2:]) for name, values in episodes.items()}
    return {name: episodes[name].new_zeros(shape, device=device) for name, shape in shapes.items()}


def padded_length(length, longest, cuda):
    """So many steps rounded up, to `longest` at most: on the GPU every length of a batch has a graph of its own."""
    unit = round_up(-(-longest // MAX_GRAPHS), CHUNK) if cuda else CHUNK
    return min(round_up(length, unit), longest)


class SavedBuffer:
    """The state of a replay buffer in a checkpoint; with its episodes a run resumes exactly.

    A buffer has `data`, its episodes by name; `lengths`, 0 for an empty slot; `cursor` and `generator`.
    """

    def __init__(self, buffer, save_episodes):
        self.buffer = buffer
        self.save_episodes = save_episodes

    def state_dict(self):
        buffer = self.buffer
        state = {"generator": buffer.generator.get_state()}
        if self.save_episodes:
            filled = len(buffer)
            data = buffer.data  # a full buffer is not copied: it may take most of the memory
            if filled < len(buffer.lengths):
                data = {name: values[:, :filled].clone() for name, values in data.items()}
            state |= {"lengths": buffer.lengths, "cursor": buffer.cursor, "episodes": data}
        return state

    def load_state_dict(self, state):
        buffer = self.buffer
        buffer.generator.set_state(state["generator"])
        if "episodes" not in state:
            print("This run was saved without its buffer: going on with an empty one.")
            return
        checkpoints.check_buffer(state, buffer.data, len(buffer.data["reward"]) - 1)
        buffer.lengths = state["lengths"]
        buffer.cursor = state["cursor"]
        for name, values in state["episodes"].items():
            buffer.data[name][:, : values.shape[1]] = values.to(buffer.data[name].device)


class SavedTensors:
    """Tensors by name that a resumed run has as they were."""

    def __init__(self, **tensors):
        self.tensors = tensors

    def state_dict(self):
        return self.tensors

    def load_state_dict(self, state):
        for name, tensor in self.tensors.items():
            tensor.copy_(state[name])
