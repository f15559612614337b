"""Recurrent layers: one GRU for all seats, or one for every seat.

On the GPU a GRU goes over all steps of a sequence in one kernel forward and one backward: `unroll`.

A block of threads takes a few rows through all steps. Four threads share two units of a row: each keeps a quarter of
these units' recurrent weights in registers, and reads the hidden state of the step before from shared memory. What the
inputs add to the gates, and the gradients of the weights, are matrix products over all steps at once, outside.
"""

import functools
import importlib.util

import torch
import torch.nn as nn
import torch.nn.functional as F

from envs import compiler

MOST_UNITS = 128  # a thread has 1.5 weights for each of them, and 255 registers at most
BLOCK = 512  # threads, if they need no more than 128 registers each: up to 64 units


# ---- templates of the kernels; the capitals and the names without an underscore are bound by _bound ----
def _sigmoid(x):
    return quotient(float32(1), float32(1) + exp(-x))


def _tanh(x):
    return float32(1) - quotient(float32(2), float32(1) + exp(x + x))


def _sum_of_four(first, second, odd):
    """Sums over the four threads that share two units: of `second` for the odd ones, of `first` for the others."""
    own, others = (second, first) if odd else (first, second)
    own += cuda.shfl_xor_sync(0xFFFFFFFF, others, 1)
    return own + cuda.shfl_xor_sync(0xFFFFFFFF, own, 2)


def _gates_at(gates, at):
    return gates[at], gates[at + UNITS], gates[at + 2 * UNITS]


def _forward(gates, h, weight, bias, y, saved, steps, rows):
    # gates (steps, rows, 3, UNITS), h (rows, UNITS), weight (3, UNITS, UNITS), bias (3, UNITS), y (steps, rows, UNITS),
    # saved (steps, rows, 4, UNITS), or empty if nothing will be learned; all flat
    states = cuda.shared.array(STATES, float32)  # of the step before and of this one: (2, ROWS, UNITS)
    w = cuda.local.array(WEIGHTS, float32)
    lane, pair, place = cuda.threadIdx.x % 4, cuda.threadIdx.x // 4, cuda.threadIdx.y
    odd, unit = lane & 1 == 1, 2 * pair + (lane & 1)
    row = min(cuda.blockIdx.x * cuda.blockDim.y + place, rows - 1)  # places behind the last row repeat it
    for k in range(QUARTER):
        for i in range(6):
            w[6 * k + i] = weight[(i // 2 * UNITS + 2 * pair + i % 2) * UNITS + 4 * k + lane]
    bias_r, bias_z, bias_n = gates_at(bias, unit)
    state = h[row * UNITS + unit]
    states[place * UNITS + unit] = state
    at, stride, ahead, end = row * UNITS + unit, rows * UNITS, 3 * row * UNITS + unit, 3 * steps * rows * UNITS
    this, following = gates_at(gates, ahead), gates_at(gates, ahead + (3 * stride if steps > 1 else 0))
    cuda.syncthreads()
    for t in range(steps):
        gate_r, gate_z, gate_n = this
        this = following
        if ahead + 6 * stride < end:  # global memory answers within two steps
            ahead += 3 * stride
            following = gates_at(gates, ahead + 3 * stride)
        r0 = r1 = z0 = z1 = n0 = n1 = float32(0)
        source = ((t & 1) * ROWS + place) * UNITS + lane
        for k in range(QUARTER):
            value = states[source + 4 * k]
            r0 += w[6 * k] * value
            r1 += w[6 * k + 1] * value
            z0 += w[6 * k + 2] * value
            z1 += w[6 * k + 3] * value
            n0 += w[6 * k + 4] * value
            n1 += w[6 * k + 5] * value
        r = sigmoid(gate_r + (sum_of_four(r0, r1, odd) + bias_r))
        z = sigmoid(gate_z + (sum_of_four(z0, z1, odd) + bias_z))
        recurrent = sum_of_four(n0, n1, odd) + bias_n
        n = tanh(gate_n + r * recurrent)
        state = n + z * (state - n)
        if lane < 2:
            states[((1 - (t & 1)) * ROWS + place) * UNITS + unit] = state
            y[at] = state
            if len(saved) > 0:
                to = 4 * at - 3 * unit
                saved[to], saved[to + UNITS], saved[to + 2 * UNITS], saved[to + 3 * UNITS] = r, z, n, recurrent
        at += stride
        cuda.syncthreads()


def _saved_at(saved, before, d_y, at, unit):
    i = 4 * at - 3 * unit
    return saved[i], saved[i + UNITS], saved[i + 2 * UNITS], saved[i + 3 * UNITS], before[at], d_y[at]


def _backward(saved, before, weight, d_y, d_gates, d_recurrent, d_h, steps, rows):
    # before (steps, rows, UNITS): the hidden states that steps begin with; d_x is the loss's gradient by x
    errors = cuda.shared.array(ERRORS, float32)  # d_recurrent of the step behind and of this one: (2, ROWS, 3, UNITS)
    w = cuda.local.array(WEIGHTS, float32)
    lane, pair, place = cuda.threadIdx.x % 4, cuda.threadIdx.x // 4, cuda.threadIdx.y
    odd, unit = lane & 1 == 1, 2 * pair + (lane & 1)
    row = min(cuda.blockIdx.x * cuda.blockDim.y + place, rows - 1)
    for k in range(QUARTER):
        for i in range(6):
            w[6 * k + i] = weight[(i // 2 * UNITS + 4 * k + lane) * UNITS + 2 * pair + i % 2]
    d_state = float32(0)
    at, stride = ((steps - 1) * rows + row) * UNITS + unit, rows * UNITS
    this = saved_at(saved, before, d_y, at, unit)
    following = saved_at(saved, before, d_y, at - (stride if steps > 1 else 0), unit)
    for t in range(steps):
        r, z, n, recurrent, last, d = this
        this = following
        if at >= 2 * stride:
            following = saved_at(saved, before, d_y, at - 2 * stride, unit)
        d += d_state
        d_n = d * (float32(1) - z) * (float32(1) - n * n)
        d_z = d * (last - n) * z * (float32(1) - z)
        d_r = d_n * recurrent * r * (float32(1) - r)
        source = ((t & 1) * ROWS + place) * 3 * UNITS
        if lane < 2:
            to = source + unit
            errors[to], errors[to + UNITS], errors[to + 2 * UNITS] = d_r, d_z, d_n * r
            to = 3 * at - 2 * unit
            d_gates[to], d_gates[to + UNITS], d_gates[to + 2 * UNITS] = d_r, d_z, d_n
            d_recurrent[to], d_recurrent[to + UNITS], d_recurrent[to + 2 * UNITS] = d_r, d_z, d_n * r
        at -= stride
        cuda.syncthreads()
        d0 = d1 = float32(0)
        for k in range(QUARTER):
            for i in range(3):
                error = errors[source + 4 * k + lane + i * UNITS]
                d0 += w[6 * k + 2 * i] * error
                d1 += w[6 * k + 2 * i + 1] * error
        d_state = d * z + sum_of_four(d0, d1, odd)
    d_h[row * UNITS + unit] = d_state


def _bound(template, units, cuda, exp, quotient, float32, device_function):
    """(the kernel for that many units, the most rows of a block)"""
    rows, quarter = max(BLOCK // (2 * units), 1) if units <= 64 else 1, units // 4
    names = {"cuda": cuda, "exp": exp, "quotient": quotient, "float32": float32}
    names |= {"UNITS": units, "QUARTER": quarter, "WEIGHTS": 6 * quarter}
    names |= {"ROWS": rows, "STATES": 2 * rows * units, "ERRORS": 6 * rows * units}
    functions = _sigmoid, _tanh, _sum_of_four, _gates_at, _saved_at
    names |= {f.__name__[1:]: device_function(compiler.rebind(f, f.__name__, **names)) for f in functions}
    name = f"gru{template.__name__}_{units}_{compiler.fingerprint(template, *functions)}"
    return compiler.rebind(template, name, **names), rows


@functools.cache
def _compiled(template, units):
    from numba import cuda, float32
    from numba.cuda import libdevice

    functions = libdevice.fast_expf, libdevice.fast_fdividef, float32
    kernel, rows = _bound(template, units, cuda, *functions, cuda.jit(device=True))
    return compiler.Kernel(kernel, registers=128 if units <= 64 else 255), rows


def _launch(template, units, steps, rows, *tensors):
    kernel, most = _compiled(template, units)
    device = tensors[0].device
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    together = min(-(-rows // processors), most)  # rows of a block: first every multiprocessor gets one
    arguments = [compiler.view(tensor.detach().flatten()) for tensor in tensors]
    kernel(-(-rows // together), (2 * units, together), device, *arguments, steps, rows)


class Unroll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, h, weight_ih, weight_hh, bias_ih, bias_hh, learns):
        h, weight_hh, bias_hh = (tensor.contiguous() for tensor in (h, weight_hh, bias_hh))
        steps, (rows, units) = len(x), h.shape
        gates = F.linear(x, weight_ih, bias_ih)
        y = h.new_empty(steps, rows, units)
        saved = h.new_empty(steps if learns else 0, rows, 4, units)  # of every step: gates, and W h + b of the last
        _launch(_forward, units, steps, rows, gates, h, weight_hh, bias_hh, y, saved)
        ctx.save_for_backward(x, h, weight_ih, weight_hh, y, saved)
        return y

    @staticmethod
    def backward(ctx, d_y):
        x, h, weight_ih, weight_hh, y, saved = ctx.saved_tensors
        steps, rows, units = y.shape
        before = torch.cat((h.unsqueeze(0), y[:-1]))
        d = h.new_empty(2, steps * rows, 3 * units)  # the loss's gradient by the gates: of the inputs, of the state
        d_h = torch.empty_like(h)
        _launch(_backward, units, steps, rows, saved, before, weight_hh, d_y.contiguous(), d[0], d[1], d_h)
        d_bias = (d.new_ones(steps * rows) @ d).unbind()  # as a product: a sum over so many rows is slow
        d_weight_ih, d_weight_hh = d[0].T @ x.flatten(0, 1), d[1].T @ before.flatten(0, 1)
        return (d[0] @ weight_ih).view_as(x), d_h, d_weight_ih, d_weight_hh, *d_bias, None


def has_kernels(units):
    """Whether `unroll` is for layers of that many units; others are cuDNN's."""
    return units <= MOST_UNITS and units % 16 == 0 and importlib.util.find_spec("numba_cuda") is not None


def unroll(x, h, weight_ih, weight_hh, bias_ih, bias_hh):
    """The hidden states (steps, rows, units) of a GRU on CUDA: x (steps, rows, inputs), h (rows, units).

    The weights are those of torch.nn.GRU, in its order.
    """
    return Unroll.apply(x, h, weight_ih, weight_hh, bias_ih, bias_hh, torch.is_grad_enabled())


class SharedGRU(nn.GRU):
    """One GRU for all seats."""

    def forward(self, x, h):  # (time, matches, seats, inputs), (matches, seats, hidden)
        rows = x.flatten(1, 2)
        h = h.flatten(0, 1)
        if len(x) == 1:
            y = torch.gru_cell(rows[0], h, *self._flat_weights)  # cuDNN is slow at single steps
        elif x.is_cuda and has_kernels(self.hidden_size):
            y = unroll(rows, h, *self._flat_weights)
        else:
            y, _ = super().forward(rows, h.unsqueeze(0))
        return y.view(*x.shape[:-1], -1)  # (time, matches, seats, hidden)

    def branch(self, x, h):
        """One step from each state h (time, matches, seats, hidden), with every one of x (time, k, matches, ...)."""
        reset, update, new = F.linear(x, self.weight_ih_l0, self.bias_ih_l0).chunk(3, -1)
        reset_h, update_h, new_h = F.linear(h, self.weight_hh_l0, self.bias_hh_l0).unsqueeze(1).chunk(3, -1)
        new = torch.tanh(new + torch.sigmoid(reset + reset_h) * new_h)
        return torch.lerp(new, h.unsqueeze(1), torch.sigmoid(update + update_h))


class RestartingGRU(SharedGRU):
    """One that starts anew at some steps. It has one more input, the last, which is 1 there and closes both gates:
    nothing of the state gets in.
    """

    def __init__(self, inputs, hidden_dim):
        super().__init__(inputs + 1, hidden_dim)
        self.close_gates()

    @torch.no_grad()
    def close_gates(self):
        """To be called once the weights are initialised."""
        self.weight_ih_l0[:, -1] = torch.cat((torch.full((2 * self.hidden_size,), -1e4), torch.zeros(self.hidden_size)))

    def forward(self, x, h, start):
        """start (time, matches, seats, 1): whether it starts anew; the rest as for SharedGRU"""
        return super().forward(torch.cat((x, start.to(x.dtype)), -1), h)


class SeatLinear(nn.Module):
    """A linear layer for every seat."""

    def __init__(self, seats, inputs, outputs):
        super().__init__()
        bound = inputs**-0.5
        self.weight = nn.Parameter(torch.empty(seats, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(seats, outputs).uniform_(-bound, bound))

    def forward(self, x):  # (..., seats, inputs)
        return torch.einsum("...ai,aio->...ao", x, self.weight) + self.bias


class SeatGRU(nn.Module):
    """A GRU for every seat."""

    def __init__(self, seats, hidden_dim):
        super().__init__()
        self.fc_input = SeatLinear(seats, hidden_dim, 3 * hidden_dim)
        self.fc_hidden = SeatLinear(seats, hidden_dim, 3 * hidden_dim)

    def forward(self, x, h):  # (time, matches, seats, hidden), (matches, seats, hidden)
        outputs = []
        for gates in self.fc_input(x).unbind():
            reset, update, new = gates.chunk(3, -1)
            reset_h, update_h, new_h = self.fc_hidden(h).chunk(3, -1)
            new = torch.tanh(new + torch.sigmoid(reset + reset_h) * new_h)
            h = torch.lerp(new, h, torch.sigmoid(update + update_h))
            outputs.append(h)
        return torch.stack(outputs)
