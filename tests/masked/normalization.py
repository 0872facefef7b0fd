"""The oracles of batch_norm and layer_norm: a loop over channels or rows, what is left out removed."""

import torch
import torch.nn.functional as F


def layer_norm_oracle(x, weight, bias, keep):
    rows = []
    for row, mask in zip(x.reshape(-1, x.shape[-1]), keep.expand(x.shape).reshape(-1, x.shape[-1]), strict=True):
        kept = row[mask]
        out = torch.zeros_like(row)
        if len(kept):
            out = out.masked_scatter(mask, F.layer_norm(kept, kept.shape, weight[mask], bias[mask]))
        rows.append(out)
    return torch.stack(rows).reshape(x.shape) if rows else x.clone()


def batch_norm_oracle(x, mean, var, weight, bias, keep, training):
    """Each channel alone, as a column of its kept elements."""
    columns = []
    flat = x.movedim(1, 0).reshape(x.shape[1], -1)
    masks = keep.expand(x.shape).movedim(1, 0).reshape(flat.shape)
    for c, (row, mask) in enumerate(zip(flat, masks, strict=True)):
        kept = row[mask].unsqueeze(1)
        out = torch.zeros_like(row)
        if len(kept) > 1 or (len(kept) and not training):
            own = slice(c, c + 1)
            running = (None, None) if mean is None else (mean[own], var[own])
            result = F.batch_norm(kept, *running, weight[own], bias[own], training)
            out = out.masked_scatter(mask, result.squeeze(1))
        elif len(kept):
            out = out.masked_scatter(mask, bias[c : c + 1])
            if mean is not None:
                mean[c] = 0.9 * mean[c] + 0.1 * kept[0, 0].detach()
        columns.append(out)
    return torch.stack(columns).reshape(x.shape[1], x.shape[0], *x.shape[2:]).movedim(0, 1)
