"""CUDA graphs and side streams. On the CPU everything runs in order, as plain PyTorch."""

import gc

import torch


class Graphed:
    """Calls a function of a batch, a dictionary of tensors. On CUDA it is captured as a graph and replayed, unless
    that is not `enabled`.

    There is one graph for each set of tensors, told apart by memory and shape. One is replayed at a time, so they use
    the same memory: nothing that the function allocates may be read after it.
    """

    def __init__(self, function, device, enabled=True):
        self.function = function
        self.capture = enabled and device.type == "cuda"
        self.graphs = {}
        if self.capture:
            self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def __call__(self, batch=None):
        arguments = () if batch is None else (batch,)
        if not self.capture:
            self.function(*arguments)
            return
        key = tuple((values.data_ptr(), values.shape) for values in (batch or {}).values())
        if key not in self.graphs:  # the first call warms up
            self.graphs[key] = None
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.function(*arguments)
            torch.cuda.current_stream().wait_stream(self.stream)
            return
        if self.graphs[key] is None:
            self.graphs[key] = self._captured(arguments)
        self.graphs[key].replay()

    def _captured(self, arguments):
        graph = torch.cuda.CUDAGraph()
        gc.disable()  # memory freed during a capture would end it
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                self.function(*arguments)
        finally:
            gc.enable()
        return graph

    def clear(self):
        """Discards the graphs, because the function has changed."""
        self.graphs.clear()
        if self.capture:
            self.pool = torch.cuda.graph_pool_handle()  # the old one ends with its last graph


def store(memory, values):
    """Copies tensors to `memory`, by name: always the same one, so that captured functions may write and read it."""
    for name, tensor in values.items():
        if name not in memory:  # in the call that warms up
            memory[name] = torch.empty_like(tensor)
        memory[name].copy_(tensor)


class SideStream:
    """`with side_stream:` runs its block on a second CUDA stream, beside what follows, up to `join()`.

    A `join()` in the block waits for what stands above it. On the CPU everything runs in order.
    """

    def __init__(self, device):
        self.stream, self.main = None, None
        if device.type == "cuda":
            self.stream, self.main = torch.cuda.Stream(), torch.cuda.current_stream()

    def __enter__(self):
        if self.stream is not None:
            self.main = torch.cuda.current_stream()
            self.stream.wait_stream(self.main)
            self.context = torch.cuda.stream(self.stream)
            self.context.__enter__()

    def __exit__(self, *error):
        if self.stream is not None:
            self.context.__exit__(*error)

    def join(self, *shared):
        """`shared` tensors, which the backward passes of both streams read, are not freed before the next `join`."""
        if self.stream is not None:
            self.main.wait_stream(self.stream)
            self.shared = shared
