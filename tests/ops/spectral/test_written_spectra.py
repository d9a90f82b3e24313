"""A spectrum is computed where it is read. What is written before or after shows as in torch."""

import pytest
import torch
from torch import Tensor, fft

from lightning_shard import UnsupportedOperationError, allow_function, gather, shard
from tests.parity import mesh_of, tiles_of


def scaled(x: Tensor) -> Tensor:
    z = fft.rfft(x, dim=0)
    z.mul_(2)
    return z * 1


def real_part(x: Tensor) -> Tensor:
    z = fft.rfft(x, dim=0)
    z.real.mul_(2)
    return z * 1


def row(x: Tensor) -> Tensor:
    z = fft.rfft2(x)
    z[0].mul_(2)
    z[..., 0].zero_()
    return fft.irfft2(z, s=x.shape)


def assigned(x: Tensor) -> Tensor:
    z = fft.rfft(x, dim=0)
    z[1:] = 0
    z[z.abs() < 1] = 0
    return fft.irfft(z, n=x.shape[0], dim=0)


def turned_first(x: Tensor) -> Tensor:
    z = fft.rfft(x, dim=0)
    turned = z.mT
    z.mul_(2)
    return turned * 1


def shifted_first(x: Tensor) -> Tensor:
    z = fft.fft(x, dim=0)
    shifted = fft.fftshift(z, dim=0)
    z.mul_(2)
    return shifted + fft.fftshift(z, dim=0)


def into_out(x: Tensor) -> Tensor:
    z = fft.fft(x.detach(), dim=0)
    torch.mul(z, 2, out=z)
    return z * 1


def slice_alone(x: Tensor) -> Tensor:
    z = fft.rfft(x, dim=0)
    low = z[:2]
    low.mul_(2)
    return low * 1


def read_before(x: Tensor) -> Tensor:
    x = x.detach()
    z = fft.rfft(x, dim=0)
    norm = z.abs().sum()
    x.mul_(2)
    return z * norm


def kept(x: Tensor) -> Tensor:
    x = x.detach()
    z = fft.rfft(x, dim=0).clone()
    x.mul_(2)
    return z


def no_graph(x: Tensor) -> Tensor:
    with torch.no_grad():
        z = fft.rfft(x, dim=0)
        modes = torch.zeros(3, 4, dtype=z.dtype)
        modes[:2] = z[:2]
    assert not z.requires_grad
    return fft.irfft(modes, n=5, dim=0) + x * z.abs().sum()


def looked_at(x: Tensor) -> Tensor:
    z = fft.rfft(x, dim=0)
    with torch.no_grad():
        z.abs().sum()
    return z.abs()


def coils(x: Tensor) -> Tensor:
    out = torch.zeros(2, *x.shape, dtype=torch.complex128)
    out[0], out[1] = x * 1j, (x + 2).to(out.dtype)
    return out.abs().sum(0)


def of_empty(x: Tensor) -> Tensor:
    out = torch.full(x.shape, 3j, dtype=torch.complex128)
    out[1:4] = x[1:4] * (1 + 1j)
    return out * 2


def some_rows(x: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.complex128)
    out[1:5:2], out[:, 3:] = x[:2] * 1j, x[:, :1] * 2j
    out[0, 1] = 7
    return out[:, 1:] * 2


def broadcast_rows(x: Tensor) -> Tensor:
    out = torch.zeros(3, *x.shape, dtype=torch.complex128)
    out[:] = x * 1j
    return out.sum(0)


def written_canvas(x: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.complex128)
    out[1:] = x[1:] * 1j
    out.mul_(2)
    out[0] = 1
    out.real.add_(x)
    return fft.ifft2(out).abs()


def looked_at_canvas(x: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.complex128)
    out[1:] = x[1:] * 1j
    with torch.no_grad():
        norm = out.abs().sum()
    return out * norm


@allow_function
class Transform(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return fft.fft(x, dim=0)

    @staticmethod
    def backward(ctx, *grads):
        return fft.fft(grads[0].conj(), dim=0).real


@allow_function
class Imaginary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.zeros(x.shape, dtype=torch.complex128)
        out[:] = x * 1j
        return out

    @staticmethod
    def backward(ctx, *grads):
        return grads[0].imag


def of_function(x: Tensor) -> Tensor:
    return Transform.apply(x).abs() + x


def inverse_of_function(x: Tensor) -> Tensor:
    return fft.ifft(Transform.apply(x), dim=0).real * 2 + x


def slice_of_function(x: Tensor) -> Tensor:
    return Transform.apply(x)[1:4] * 2


def gathered_function(x: Tensor) -> Tensor:
    return gather(Transform.apply(x)) * 2


def canvas_of_function(x: Tensor) -> Tensor:
    return fft.ifft(Imaginary.apply(x), dim=0).abs() + x


def hooked(x: Tensor) -> Tensor:
    z = fft.fft(x, dim=0)
    if z.requires_grad:
        z.register_hook(lambda grad: grad * 3)
    return fft.ifft(z, dim=0).abs()


EXACT = [
    hooked,
    of_function, inverse_of_function, slice_of_function, gathered_function, canvas_of_function,
    coils, of_empty, some_rows, broadcast_rows, written_canvas, looked_at_canvas,
    scaled, real_part, row, assigned, turned_first, shifted_first, into_out, slice_alone,
    read_before, kept, no_graph, looked_at,
]  # fmt: skip


def old_field(x: Tensor) -> Tensor:
    z = fft.rfft(x, dim=0)
    x.mul_(2)
    return z * 1


def old_field_in_part(x: Tensor) -> Tensor:
    z = fft.rfft(x, dim=0)
    x[1] = 2
    return z[:2]


def written_slice(x: Tensor) -> Tensor:
    z = fft.rfft(x, dim=0)
    z[1:].zero_()
    return fft.irfft(z, n=5, dim=0)


def old_slice(x: Tensor) -> Tensor:
    z = fft.rfft(x, dim=0)
    low = z[:2]
    z.mul_(2)
    return low * 1


def old_slice_by_a_view(x: Tensor) -> Tensor:
    z = fft.rfft(x, dim=0)
    low = z[:2]
    z.real.mul_(2)
    return low * 1


def old_modes(x: Tensor) -> Tensor:
    modes = fft.rfft(x, dim=0)[:2] * 2
    out = torch.zeros(3, 4, dtype=modes.dtype)
    out[:2] = modes
    modes.mul_(3)
    return fft.irfft(out, n=5, dim=0)


def other_order_in_memory(x: Tensor) -> Tensor:
    z = fft.fft(x, dim=0)  # whose columns lie one after the other in torch
    z.reshape(-1).mul_(2)
    return z * 1


REFUSED = {
    old_field: r"Transform x\.clone\(\)",
    old_field_in_part: r"Transform x\.clone\(\)",
    written_slice: r"spectrum\[index\] = values",
    old_slice: r"write into spectrum\.clone\(\)",
    old_slice_by_a_view: r"clone\(\)",
    old_modes: r"Assign modes\.clone\(\)",
    other_order_in_memory: r"clone\(\)",
}


def check(where) -> None:
    torch.manual_seed(0)
    whole = torch.randn(5, 4, dtype=torch.float64)
    for program in EXACT:
        leaves = [whole.clone().requires_grad_(), shard(whole.clone(), where, 0).requires_grad_()]
        correct, found = (program(1 * leaf) for leaf in leaves)
        torch.testing.assert_close(gather(found), correct, msg=program.__name__)
        assert found.requires_grad == correct.requires_grad, program.__name__
        if correct.requires_grad:
            correct.abs().square().sum().backward()
            found.abs().square().sum().backward()
            torch.testing.assert_close(gather(leaves[1].grad), leaves[0].grad, msg=program.__name__)
    for program, words in REFUSED.items():
        with pytest.raises(UnsupportedOperationError, match=words):
            program(shard(whole.clone(), where, 0))
        with torch.inference_mode(), pytest.raises(UnsupportedOperationError, match=words):
            program(shard(whole.clone(), where, 0))


@pytest.mark.spmd(3)
def test_writes_around_a_spectrum():
    check(mesh_of(3))


def test_writes_around_a_spectrum_in_tiles():
    check(tiles_of(3))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        return z * 2

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * 2


def test_a_function_of_a_spectrum_in_tiles_has_its_gradient_or_is_refused():
    whole = torch.randn(5, 4, dtype=torch.float64).requires_grad_()
    field = shard(whole.detach(), tiles_of(3), 0).requires_grad_()
    with pytest.raises(
        UnsupportedOperationError, match=r"apply it to spectrum\.clone\(\)|take its clone\(\)"
    ):
        (Double.apply(fft.fft(field, dim=0)).abs().sum() + field.sum()).backward()
    field.grad = None
    for x in (whole, field):
        (Double.apply(fft.fft(x, dim=0).clone()).abs().sum() + x.sum()).backward()
    torch.testing.assert_close(gather(field.grad), whole.grad)


def kept_gradient(x):
    z = fft.fft(x, dim=0)
    z.retain_grad()
    fft.ifft(z, dim=0).abs().sum().backward()
    return gather(z.grad)


@pytest.mark.spmd(2)
def test_the_gradient_of_a_spectrum_can_be_kept():
    whole = torch.arange(1.0, 21.0, dtype=torch.float64).view(5, 4)
    wanted = kept_gradient(whole.clone().requires_grad_())
    for mesh in (mesh_of(2), tiles_of(3)):
        found = kept_gradient(shard(whole, mesh, 0).requires_grad_())
        torch.testing.assert_close(found, wanted)
