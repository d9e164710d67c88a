"""An LSTM layer along texts, in training: products of inputs and of gradients are made for all rows at once.

Only h W stays in the loop over tokens. Left to autograd, each token would add a gradient as large as W.

Shape letters: B sequences, T tokens, H hidden size, G = 4H gates (in, forget, new, out).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


def along(pre_BTG: Tensor, weight_GH: Tensor) -> tuple[Tensor, Tensor]:
    """The layer from zeros on: h and c behind every token, float32 [B, T, H] each.

    Args:
        pre_BTG: what inputs and bias add to the gates, float32.
        weight_GH: of h; products are made in its dtype.
    """
    found = _Along.apply(pre_BTG, weight_GH)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, Tensor], found)


class _Along(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pre_BTG: Tensor, weight_GH: Tensor) -> tuple[Tensor, Tensor]:
        batch, longest, _ = pre_BTG.shape
        h_BH = pre_BTG.new_zeros(batch, weight_GH.shape[1])
        c_BH, gates, hs, cs = h_BH, list[Tensor](), list[Tensor](), list[Tensor]()
        with torch.autocast(pre_BTG.device.type, enabled=False):
            for at in range(longest):
                z_BG = pre_BTG[:, at] + (h_BH.to(weight_GH.dtype) @ weight_GH.T).float()
                enter, forget, new, leave = z_BG.chunk(4, -1)
                enter, forget, new, leave = enter.sigmoid(), forget.sigmoid(), new.tanh(), leave.sigmoid()
                c_BH = forget * c_BH + enter * new
                h_BH = leave * c_BH.tanh()
                gates.append(torch.cat([enter, forget, new, leave], -1))
                hs.append(h_BH)
                cs.append(c_BH)
        gate_BTG, h_BTH, c_BTH = torch.stack(gates, 1), torch.stack(hs, 1), torch.stack(cs, 1)
        ctx.save_for_backward(gate_BTG, h_BTH, c_BTH, weight_GH)
        return h_BTH, c_BTH

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, Tensor]:
        gate_BTG, h_BTH, c_BTH, weight_GH = ctx.saved_tensors
        back_BH, keep_BH = torch.zeros_like(h_BTH[:, 0]), torch.zeros_like(h_BTH[:, 0])
        into_BTG = torch.empty_like(gate_BTG)
        curve_BTH = c_BTH.tanh()
        with torch.autocast(gate_BTG.device.type, enabled=False):
            for at in reversed(range(gate_BTG.shape[1])):
                enter, forget, new, leave = gate_BTG[:, at].chunk(4, -1)
                out_BH, curve_BH = given[0][:, at] + back_BH, curve_BTH[:, at]
                c_BH = given[1][:, at] + keep_BH + out_BH * leave * (1 - curve_BH**2)
                before_BH = c_BTH[:, at - 1] if at else torch.zeros_like(c_BH)
                into_BG = torch.cat(
                    [
                        c_BH * new * enter * (1 - enter),
                        c_BH * before_BH * forget * (1 - forget),
                        c_BH * enter * (1 - new**2),
                        out_BH * curve_BH * leave * (1 - leave),
                    ],
                    -1,
                )
                into_BTG[:, at] = into_BG
                keep_BH = c_BH * forget
                back_BH = (into_BG.to(weight_GH.dtype) @ weight_GH).float()
            rows = into_BTG[:, 1:].flatten(0, 1), h_BTH[:, :-1].flatten(0, 1)
            weight = (rows[0].T.to(weight_GH.dtype) @ rows[1].to(weight_GH.dtype)).to(weight_GH.dtype)
        return into_BTG, weight
