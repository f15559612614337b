"""The kernels of the GRU: on the GPU where there is one, and as plain Python, in as many threads as CUDA has."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn

from training import gru


class FakeCuda:
    """What the kernels use of CUDA, for one block at a time, in threads of Python."""

    def __init__(self, index, block, threads):
        self.blockIdx, self.blockDim = SimpleNamespace(x=index), SimpleNamespace(x=block[0], y=block[1])
        self.threadIdx = threading.local()
        self.barrier, self.lock = threading.Barrier(threads), threading.Lock()
        self.arrays, self.values = {}, [None] * threads
        self.shared = SimpleNamespace(array=self._shared_array)
        self.local = SimpleNamespace(array=lambda size, dtype: np.full(size, np.nan, dtype))

    def _shared_array(self, size, dtype):
        with self.lock:
            return self.arrays.setdefault(size, np.full(size, np.nan, dtype))

    def syncthreads(self):
        self.barrier.wait()

    def shfl_xor_sync(self, mask, value, distance):
        here = self.threadIdx.y * self.blockDim.x + self.threadIdx.x
        self.values[here] = value
        self.barrier.wait()
        received = self.values[here ^ distance]
        self.barrier.wait()
        return received


def launch(template, units, steps, rows, *tensors, together=2):
    """Runs a kernel with blocks of so many rows, block by block."""
    arrays = [tensor.detach().numpy().reshape(-1) for tensor in tensors]
    width = 2 * units
    for index in range(-(-rows // together)):
        cuda = FakeCuda(index, (width, together), width * together)
        kernel, _ = gru._bound(template, units, cuda, np.exp, np.divide, np.float32, lambda function: function)

        def run(x, y, cuda=cuda, kernel=kernel):
            cuda.threadIdx.x, cuda.threadIdx.y = x, y
            try:
                kernel(*arrays, steps, rows)
            except BaseException:
                cuda.barrier.abort()
                raise

        threads = [threading.Thread(target=run, args=(x, y)) for y in range(together) for x in range(width)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU here")
ON_GPU = [(16, 3, 4), (64, 700, 30), (96, 5, 7), (128, 140, 9), (64, 3, 1)]


@pytest.mark.parametrize(
    ("device", "units", "rows", "steps"),
    [("cpu", 16, 3, 4), ("cpu", 16, 2, 1), *(pytest.param("cuda", *sizes, marks=NO_GPU) for sizes in ON_GPU)],
)
def test_unroll_has_the_values_and_gradients_of_a_gru(device, units, rows, steps, monkeypatch):
    """Of its inputs, of the first hidden state and of all weights; also with more rows than blocks have room for."""
    if device == "cpu":
        monkeypatch.setattr(gru, "_launch", launch)
    torch.manual_seed(0)
    layer, h = nn.GRU(5, units), torch.randn(rows, units, requires_grad=True)
    x, weight = torch.randn(steps, rows, 5, requires_grad=True), torch.randn(steps, rows, units)
    expected, leaves = layer(x, h.unsqueeze(0))[0], (x, h, *layer.parameters())
    arguments = [tensor.to(device) for tensor in (x, h, *layer._flat_weights)]
    found = gru.unroll(*arguments).cpu()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert gru.unroll(*arguments).cpu().equal(found)
    for ours, theirs in zip(*(torch.autograd.grad((y * weight).sum(), leaves) for y in (found, expected))):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())


def test_other_sizes_are_left_to_cudnn(monkeypatch):
    monkeypatch.setattr(gru.importlib.util, "find_spec", lambda name: name)
    assert [units for units in (8, 16, 40, 64, 96, 128, 256) if gru.has_kernels(units)] == [16, 64, 96, 128]
