"""Losses that make a draft's distribution agree with the target's, plain and fast.

p is the target's distribution and q the draft's, both over the draft vocabulary. Every loss exists twice.
In ``ORACLES`` it is as the formula says it, and differentiated by autograd. In ``LAWS`` it has its
gradient in closed form. With that, ``head_loss`` goes from hidden states to a loss without ever holding
all logits.

What a pass accepts of a sampled draft is alpha = sum min(p, q) = 1 - tv; at temperature 0 it is
whether the two argmaxes agree. Smaller is better everywhere, and every loss is 0 at q = p,
except ``ce``.

    ce       -log q(label)                                   hard labels
    kl       sum p log(p / q)                                forward
    rkl      sum q log(q / p)                                reverse
    jsd      b KL(p | m) + (1 - b) KL(q | m), m = b p + (1 - b) q, b = 1/2
    tv       1/2 sum |p - q|
    lk       -log sum min(p, q)                              negative log acceptance
    lk_mix   l kl + (1 - l) tv, l = exp(-3 alpha)            l is a weight: no gradient through it

``feature_loss`` regresses features beside a loss on distributions, as EAGLE-1 and HASS do; here `fspad` and
`falcon`. Its oracle is ``smooth_l1``. EAGLE-3 found distributions alone better.

Papers: DistillSpec, arXiv:2310.08461 (kl, rkl, jsd, tv); Samarin et al. 2026, arXiv:2602.23881
(lk, lk_mix); EAGLE, arXiv:2401.15077 (smooth_l1 on features).

Shape letters: R rows, D draft vocabulary, H hidden size, C rows of a chunk, N rows of distributions,
B blocks, A guesses of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.errors import UnknownNameError

Oracle = Callable[[Tensor, Tensor], Tensor]
"""(draft logits [R, D], p [R, D]) -> loss [R]."""
Fast = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(draft logits [R, D], float32, which it may overwrite, p [R, D]) -> loss [R], its gradient
[R, D] with respect to the logits."""

HALF, SLOPE = 0.5, 3.0
"""b of ``jsd``; the 3 of ``lk_mix``."""
TINY = 1e-30
"""Probabilities below count as this where a logarithm or a quotient is taken."""
CHUNK = 256
"""Rows whose logits exist at a time: 8 MB at 8192 columns, which stays in the caches of a CPU."""
BLOCK = 4096
"""Rows whose gradients exist at a time: 67 MB at 8192 columns in bfloat16. On a GPU, whose launches cost more
than its caches save, logits as well.
"""


def chunks(rows: Tensor) -> Iterator[slice]:
    """Slices of rows whose logits exist at a time; one of no rows if there are none."""
    size = CHUNK if rows.device.type == "cpu" else BLOCK
    return (slice(lo, lo + size) for lo in range(0, max(1, len(rows)), size))


def _log(p_RD: Tensor) -> Tensor:
    return p_RD.clamp_min(TINY).log()


# The oracles.


def kl(z_RD: Tensor, p_RD: Tensor) -> Tensor:
    """Forward Kullback-Leibler divergence: q has to be everywhere where p is."""
    return (p_RD * (_log(p_RD) - z_RD.log_softmax(-1))).sum(-1)


def rkl(z_RD: Tensor, p_RD: Tensor) -> Tensor:
    """Reverse divergence: q keeps away from where p is not."""
    logq_RD = z_RD.log_softmax(-1)
    return (logq_RD.exp() * (logq_RD - _log(p_RD))).sum(-1)


def jsd(z_RD: Tensor, p_RD: Tensor) -> Tensor:
    """Jensen-Shannon divergence."""
    q_RD = z_RD.softmax(-1)
    logm_RD = _log(HALF * p_RD + (1 - HALF) * q_RD)
    toward_p = (p_RD * (_log(p_RD) - logm_RD)).sum(-1)
    toward_q = (q_RD * (_log(q_RD) - logm_RD)).sum(-1)
    return HALF * toward_p + (1 - HALF) * toward_q


def tv(z_RD: Tensor, p_RD: Tensor) -> Tensor:
    """Total variation distance, 1 - acceptance."""
    return 0.5 * (z_RD.softmax(-1) - p_RD).abs().sum(-1)


def lk(z_RD: Tensor, p_RD: Tensor) -> Tensor:
    """Negative logarithm of the acceptance."""
    return -_log(acceptance(z_RD, p_RD))


def lk_mix(z_RD: Tensor, p_RD: Tensor) -> Tensor:
    """Divergence while acceptance is low, total variation once it is high."""
    share_R = (-SLOPE * acceptance(z_RD, p_RD)).exp().detach()
    return share_R * kl(z_RD, p_RD) + (1 - share_R) * tv(z_RD, p_RD)


def cross_entropy(z_RD: Tensor, label_R: Tensor) -> Tensor:
    """Negative log probability of a label."""
    return -z_RD.log_softmax(-1).gather(-1, label_R[:, None]).squeeze(-1)


def smooth_l1(a_RH: Tensor, b_RH: Tensor) -> Tensor:
    """Mean over the features of d^2 / 2 where |d| < 1 and |d| - 1/2 elsewhere, d = a - b; [R]."""
    d_RH = (a_RH - b_RH).abs()
    return torch.where(d_RH < 1, 0.5 * d_RH * d_RH, d_RH - 0.5).mean(-1)


def acceptance(z_RD: Tensor, p_RD: Tensor) -> Tensor:
    """The chance that a token sampled from q is accepted: alpha = sum min(p, q), [R]."""
    return torch.minimum(z_RD.softmax(-1), p_RD).sum(-1)


ORACLES: Mapping[str, Oracle] = {"kl": kl, "rkl": rkl, "jsd": jsd, "tv": tv, "lk": lk, "lk_mix": lk_mix}
"""Plain versions of the losses on distributions."""


# The same with gradients in closed form. For a loss f(q) of q = softmax(z):
# df/dz = q * (g - sum(q * g)), g = df/dq.


def _law(z_RD: Tensor) -> tuple[Tensor, Tensor]:
    """Turn logits into q, in place, and give log sum exp of the logits."""
    top_R1 = z_RD.amax(-1, keepdim=True)
    z_RD.sub_(top_R1).exp_()
    mass_R1 = z_RD.sum(-1, keepdim=True)
    return z_RD.div_(mass_R1), (top_R1 + mass_R1.log()).squeeze(-1)


def _through_softmax(q_RD: Tensor, g_RD: Tensor) -> Tensor:
    """df/dz from q and df/dq, which is overwritten."""
    return g_RD.sub_(torch.linalg.vecdot(q_RD, g_RD)[:, None]).mul_(q_RD)


def _fast_kl(z_RD: Tensor, p_RD: Tensor) -> tuple[Tensor, Tensor]:
    crossed_R = torch.linalg.vecdot(p_RD, z_RD)
    own_R = torch.linalg.vecdot(p_RD, _log(p_RD))
    q_RD, whole_R = _law(z_RD)
    return own_R + whole_R - crossed_R, q_RD.sub_(p_RD)


def _fast_rkl(z_RD: Tensor, p_RD: Tensor) -> tuple[Tensor, Tensor]:
    log_RD = z_RD.clone()
    q_RD, whole_R = _law(z_RD)
    ratio_RD = log_RD.sub_(whole_R[:, None]).sub_(_log(p_RD))
    loss_R = torch.linalg.vecdot(q_RD, ratio_RD)
    return loss_R, ratio_RD.sub_(loss_R[:, None]).mul_(q_RD)


def _fast_jsd(z_RD: Tensor, p_RD: Tensor) -> tuple[Tensor, Tensor]:
    q_RD, _ = _law(z_RD)
    logm_RD = _log(HALF * p_RD + (1 - HALF) * q_RD)
    ratio_RD = _log(q_RD).sub_(logm_RD)
    toward_p = torch.linalg.vecdot(p_RD, _log(p_RD).sub_(logm_RD))
    loss_R = HALF * toward_p + (1 - HALF) * torch.linalg.vecdot(q_RD, ratio_RD)
    return loss_R, _through_softmax(q_RD, ratio_RD.mul_(1 - HALF))


def _fast_tv(z_RD: Tensor, p_RD: Tensor) -> tuple[Tensor, Tensor]:
    q_RD, _ = _law(z_RD)
    apart_RD = q_RD - p_RD
    loss_R = 0.5 * apart_RD.abs().sum(-1)
    return loss_R, _through_softmax(q_RD, apart_RD.sign_().mul_(0.5))


def _fast_lk(z_RD: Tensor, p_RD: Tensor) -> tuple[Tensor, Tensor]:
    q_RD, _ = _law(z_RD)
    alpha_R = torch.minimum(q_RD, p_RD).sum(-1).clamp_min(TINY)
    below_RD = (q_RD < p_RD).to(q_RD.dtype)
    return -alpha_R.log(), _through_softmax(q_RD, below_RD.div_(-alpha_R[:, None]))


def _fast_lk_mix(z_RD: Tensor, p_RD: Tensor) -> tuple[Tensor, Tensor]:
    kl_R = torch.linalg.vecdot(p_RD, _log(p_RD)) - torch.linalg.vecdot(p_RD, z_RD)
    q_RD, whole_R = _law(z_RD)
    kl_RD = q_RD - p_RD
    far_R = 0.5 * kl_RD.abs().sum(-1)
    far_RD = _through_softmax(q_RD, kl_RD.sign().mul_(0.5))
    # Of two distributions alpha is 1 - tv; the oracle counts it.
    share_R = (-SLOPE * (1 - far_R)).exp()
    grad_RD = kl_RD.mul_(share_R[:, None]).add_(far_RD.mul_(1 - share_R[:, None]))
    return share_R * (kl_R + whole_R) + (1 - share_R) * far_R, grad_RD


def _fast_cross_entropy(z_RD: Tensor, label_R: Tensor) -> tuple[Tensor, Tensor]:
    said_R = z_RD.gather(-1, label_R[:, None]).squeeze(-1)
    q_RD, whole_R = _law(z_RD)
    q_RD[torch.arange(len(label_R), device=q_RD.device), label_R] -= 1
    return whole_R - said_R, q_RD


LAWS: Mapping[str, Fast] = {
    "kl": _fast_kl,
    "rkl": _fast_rkl,
    "jsd": _fast_jsd,
    "tv": _fast_tv,
    "lk": _fast_lk,
    "lk_mix": _fast_lk_mix,
}
"""Fast versions of the losses on distributions."""
LOSSES = ("ce", *LAWS)
"""Names of the losses that an objective can be asked for."""


def check(name: str) -> str:
    """Give the name back.

    Raises:
        UnknownNameError: no loss has it.
    """
    if name not in LOSSES:
        raise UnknownNameError("loss", name, LOSSES)
    return name


def head_loss(
    hidden_RH: Tensor,
    head_DH: Tensor,
    name: str,
    *,
    p_ND: Tensor | None = None,
    row_R: Tensor | None = None,
    label_R: Tensor | None = None,
    weight_R: Tensor | None = None,
) -> Tensor:
    """Sum of a loss over rows, from their normed hidden states.

    Logits and distributions exist for the rows of one of ``chunks``, gradients for ``BLOCK``. Gradients
    flow to ``hidden_RH`` and ``head_DH`` where they ask for them. They are computed on the way there,
    so backward only scales them. Under autocast the products are of its dtype.

    Args:
        p_ND: the target's distributions, for every loss but ``ce``.
        row_R: row of ``p_ND`` that belongs to each row.
        label_R: int64 draft ids, for ``ce``.
        weight_R: how much each row counts; None: all alike.

    Returns:
        A scalar, float32.

    Cost: three products of R x D x H and a few sweeps over R x D.
    """

    def judged(z_CD: Tensor, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        if name == "ce":
            assert label_R is not None, "ce needs labels"
            return _fast_cross_entropy(z_CD, label_R[lo:hi])
        assert p_ND is not None and row_R is not None, f"{name} needs distributions"
        return LAWS[name](z_CD, p_ND.index_select(0, row_R[lo:hi]))

    def weighed(z_CD: Tensor, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        loss_C, grad_CD = judged(z_CD, lo, hi)
        if weight_R is None:
            return loss_C, grad_CD
        return loss_C * weight_R[lo:hi], grad_CD.mul_(weight_R[lo:hi, None])

    kind = hidden_RH.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_RH.dtype
    with torch.autocast(kind, enabled=False):
        loss: Tensor = _HeadLoss.apply(  # type: ignore[no-untyped-call]
            hidden_RH, head_DH, weighed, dtype
        )
    return loss


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_RH: Tensor, head_DH: Tensor, judged: Any, dtype: Any) -> Tensor:
        to_hidden, to_head = ctx.needs_input_grad[:2]
        ctx.dtypes = hidden_RH.dtype, head_DH.dtype
        hidden_RH, head_DH = hidden_RH.to(dtype), head_DH.to(dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden_RH.device)
        hidden_grad_RH = torch.empty_like(hidden_RH) if to_hidden else None
        head_grad_DH = None
        for begin in range(0, len(hidden_RH), BLOCK):
            part_RH = hidden_RH[begin : begin + BLOCK]
            grad_RD = part_RH.new_empty(len(part_RH), len(head_DH))
            for some in chunks(part_RH):
                z_CD = part_RH[some] @ head_DH.T
                z_CD = z_CD.float() if z_CD.dtype is torch.bfloat16 else z_CD
                loss_C, grad_CD = judged(z_CD, begin + some.start, begin + some.start + len(z_CD))
                total = total + loss_C.sum()
                grad_RD[some] = grad_CD
            if hidden_grad_RH is not None:
                torch.mm(grad_RD, head_DH, out=hidden_grad_RH[begin : begin + BLOCK])
            if to_head:
                # A product as large as the head, and its sum, cost as much as 100 rows do.
                more_DH = grad_RD.T @ part_RH
                head_grad_DH = more_DH if head_grad_DH is None else head_grad_DH.float() + more_DH
        if to_head and head_grad_DH is None:
            head_grad_DH = torch.zeros_like(head_DH)
        ctx.grads = hidden_grad_RH, head_grad_DH
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        scaled = [
            None if one is None else one.to(dtype) * grads[0]
            for one, dtype in zip(ctx.grads, ctx.dtypes, strict=True)
        ]
        return (*scaled, None, None)


def depth_weights(depths: int, decay: float) -> tuple[float, ...]:
    """decay^0, decay^1, ...: deeper guesses are reached more rarely, so they count less."""
    return tuple(decay**depth for depth in range(depths))


@torch.no_grad()
def confidences(hidden_RH: Tensor, head_DH: Tensor, label_R: Tensor) -> Tensor:
    """The draft's probabilities of some labels, float32 [R]; logits exist as ``chunks`` says.

    Args:
        label_R: int64 draft ids.
    """
    out_R = torch.empty(len(hidden_RH), device=hidden_RH.device)
    for some in chunks(hidden_RH):
        q_CD, _ = _law((hidden_RH[some].to(head_DH.dtype) @ head_DH.T).float())
        out_R[some] = q_CD.gather(-1, label_R[some, None]).squeeze(-1)
    return out_R


def pace_weights(q_BA: Tensor, smooth: float, real_BA: Tensor) -> Tensor:
    """Weights of D-PACE: how much of a block's expected length hangs on each of its guesses, [..., A].

        c_i = smooth + (1 - smooth) q_i;    weight_j = sum over k >= j of c_0 c_1 ... c_k

    A draft is kept up to its first wrong guess. If guess i is right with probability q_i, its expected
    length is the sum over k of q_0 ... q_k. The derivative of that by log q_j is the sum over k >= j, so
    this is what -log q_j is weighed by. (By q_j it is the sum divided by q_j, and -log brings that
    quotient itself.) Smoothed confidence lets deep guesses learn while those before are still weak. The
    derivative of the smoothed sum has a factor (1 - smooth) q_j / c_j more, which the paper leaves out.

    From the paper, arXiv:2605.18810: both lines above (equations 7 and 8), that weights have no gradient,
    and 0.5 for ``smooth``. There they weigh cross-entropy to the text. Ours: that they may weigh other
    losses, blocks that end with the text, and the scale, which is left to the caller.

    Args:
        q_BA: the draft's probability of the text's token at every guess; 0 where it has no such token.
        smooth: in (0, 1]; at 1 the weights are A, A - 1, ... 1.
        real_BA: bool; the first guess behind the text, and all after it, are nothing to reach.
    """
    reach_BA = (smooth + (1 - smooth) * q_BA).where(real_BA, 0.0).detach().cumprod(-1)
    return reach_BA.flip(-1).cumsum(-1).flip(-1)


def weighted(loss_J: Sequence[Tensor], weight_J: Sequence[float]) -> Tensor:
    """Sum of weight * loss over depths."""
    return torch.stack([w * one for one, w in zip(loss_J, weight_J, strict=True)]).sum()


def feature_loss(a_RH: Tensor, b_RH: Tensor) -> Tensor:
    """``smooth_l1`` by one kernel, forward and backward; [R]."""
    return F.smooth_l1_loss(a_RH, b_RH, reduction="none").mean(-1)


def state_loss(student: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """What shallow states lose against deep ones, which get no gradient: mean squared errors, averaged.

    From the last deep layer to the first, each is learned by the closest shallow layer below the one that was
    taken before. Where none is left, it is learned by that one again (FREE, arXiv:2310.05424).

    Args:
        student: states after shallow layers, ascending, of one shape.
        teacher: states after deep layers, ascending.
    """
    total, last = student[0].new_zeros(()), len(student)
    for goal in reversed(teacher):
        errors = [(one - goal.detach()).float().square().mean() for one in student[: max(1, last)]]
        last = min(range(len(errors)), key=[float(one.detach()) for one in errors].__getitem__)
        total = total + errors[last]
    return total / len(teacher)
