"""What a HELM is, in plain torch, dense and MICE, to be read from top to bottom.

A point of the hyperboloid of curvature ``-c`` is its n space components ``s``; its time ``t = sqrt(|s|^2 + 1/c)`` is
derived where a formula reads it, and ``<x, y>_L = s_x.s_y - t_x t_y``. Nothing is fused, padded or cached; all is
float32 or float64. ``PlainHelm(config).load_state_dict(model.state_dict())`` takes the weights of a fast model, and
tests hold that one to what stands here. Shapes: B sequences, N tokens, H heads, E experts, V tokens in all.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def time(s: Tensor, c: float | Tensor) -> Tensor:
    """The times of points: (..., n) -> (..., 1)."""
    return (s.square().sum(-1, keepdim=True) + 1 / c).sqrt()


def empty(*sizes: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(sizes))


class Linear(nn.Module):
    """``W s + w_t t + b`` of points, or of several points in a row, each with its own time: (..., n) -> (..., m)."""

    def __init__(self, in_features: int, out_features: int, c: float, bias: bool = True, points: int = 1):
        super().__init__()
        self.c, self.points, self.weight = c, points, empty(out_features, in_features)
        self.weight_time = empty(out_features) if points == 1 else empty(out_features, points)
        self.bias = empty(out_features) if bias else None

    def forward(self, s: Tensor) -> Tensor:
        t = time(s.unflatten(-1, (self.points, -1)), self.c).squeeze(-1)  # (..., points)
        return F.linear(s, self.weight, self.bias) + t @ self.weight_time.view(-1, self.points).T


def rms_norm(s: Tensor, gain: Tensor, config: Any) -> Tensor:
    return F.rms_norm(s, s.shape[-1:], gain, config.rms_norm_eps)


def residual(x: Tensor, y: Tensor, raw_weight: Tensor, config: Any) -> Tensor:
    """``gain a / sqrt(-c <a, a>_L)`` of ``a = x + w y``, w = softplus(raw_weight): the centroid, made longer."""
    c, w = config.curvature, F.softplus(raw_weight)
    opposite = time(x, c) * time(y, c) - (x * y).sum(-1, keepdim=True)  # -<x, y>_L >= 1/c, where no |x|^2 enters
    return config.residual_gain * (x + w * y) * torch.rsqrt(1 + w * w + 2 * w * c * opposite.clamp(min=1 / c))


def rotary_frequencies(config: Any, length: int) -> tuple[Tensor, float]:
    """Angle per position of L pairs of components (L,), in float32, and the factor on scores that belongs to it."""
    rope, size = config.rope_parameters, config.rotary_dim
    if rope["rope_type"] == "default":
        return 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2).float() / size), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # linear, dynamic, yarn, longrope, llama3

    config = copy.copy(config)
    config.head_dim = size
    frequency, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu", seq_len=length)
    return frequency, scale**2


def rotate(s: Tensor, angle: Tensor, pairing: str) -> Tensor:
    """HOPE: the first 2 L components of (B, N, H, d) turn in pairs by angles (N, 1, L), and times stay."""
    turned, rest = s.tensor_split([2 * angle.shape[-1]], -1)
    interleaved = pairing == "interleaved"  # component 2 l turns with 2 l + 1, else l with l + L
    pairs = turned.unflatten(-1, (-1, 2)) if interleaved else turned.unflatten(-1, (2, -1)).mT  # (B, N, H, L, 2)
    (a, b), cos, sin = pairs.unbind(-1), angle.cos(), angle.sin()
    pairs = torch.stack([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([(pairs if interleaved else pairs.mT).flatten(-2), rest], -1)


def attend(q: Tensor, k: Tensor, v: Tensor, tau: Tensor, c: float, seen: Tensor) -> Tensor:
    """Centroids of values with weights ``softmax_j((2/c + 2<q_i, k_j>_L) / tau)``: (B, N, H, d) -> (B, N, H d_v)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, N, d or d_v)
    scores = (2 / c + 2 * (q @ k.mT - time(q, c) @ time(k, c).mT)) / tau  # (B, H, N, N)
    weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1) * seen  # 0 if nothing is seen
    origin = c**-0.5  # its time; times enter by what they have above it, so that nothing large is rounded
    mean, excess = weights @ v, weights @ (time(v, c) - origin)
    gap = excess * (excess + 2 * origin) - mean.square().sum(-1, keepdim=True)  # -<m, m>_L - 1/c of the mean m
    return (mean * torch.rsqrt(1 + c * gap.clamp(min=0))).transpose(1, 2).flatten(-2)


class Attention(nn.Module):
    """Points (B, N, n) -> (B, N, n). Queries, keys and values of each head are points of their own.

    In MICE keys and values come from a latent point; a head has d_r components that turn, in keys the same for all.
    """

    def __init__(self, config: Any):
        super().__init__()
        n, H, c, bias = config.hidden_size, config.num_attention_heads, config.curvature, config.attention_bias
        self.config, value_dim, rank, query_rank = config, config.head_dim, config.kv_lora_rank, config.q_lora_rank
        if config.variant == "dense":
            self.qkv_proj = Linear(n, 3 * H * value_dim, c, bias)
        else:
            nope, value_dim = config.qk_nope_head_dim, config.v_head_dim
            queries = H * (config.qk_rope_head_dim + nope)
            self.sizes = [query_rank or queries, rank, config.qk_rope_head_dim]
            self.down = Linear(n, sum(self.sizes), c, bias)
            if query_rank:
                self.q_gain, self.q_up = empty(query_rank), Linear(query_rank, queries, c, bias)
            self.kv_gain, self.kv_up = empty(rank), Linear(rank, H * (nope + value_dim), c, bias)
        self.o_proj = Linear(H * value_dim, n, c, bias, points=H)
        self.log_tau = empty(1)

    def forward(self, x: Tensor, angle: Tensor, score_scale: float, seen: Tensor) -> Tensor:
        config, H = self.config, self.config.num_attention_heads
        if config.variant == "dense":
            q, k, v = self.qkv_proj(x).unflatten(-1, (3, H, -1)).unbind(2)  # (B, N, H, d) each
            k = rotate(k, angle, config.rope_pairing)
        else:
            q, latent, shared = self.down(x).split(self.sizes, -1)
            if config.q_lora_rank:
                q = self.q_up(rms_norm(q, self.q_gain, config))
            k, v = self.kv_up(rms_norm(latent, self.kv_gain, config)).tensor_split([H * config.qk_nope_head_dim], -1)
            q, k, v = (s.unflatten(-1, (H, -1)) for s in (q, k, v))
            shared = rotate(shared.unsqueeze(2), angle, config.rope_pairing)  # (B, N, 1, d_r)
            k = torch.cat([shared.expand(-1, -1, H, -1), k], -1)
        q, tau = rotate(q, angle, config.rope_pairing), self.log_tau.exp() / score_scale
        return self.o_proj(attend(q, k, v * config.value_scale, tau, config.curvature, seen))


class FFN(nn.Module):
    """``W_2 (silu(W_1 x) * W_3 x)``, each map of points with their times."""

    def __init__(self, config: Any):
        super().__init__()
        n, hidden, c, bias = config.hidden_size, config.intermediate_size, config.curvature, config.ffn_bias
        self.gate_up_proj, self.down_proj = Linear(n, 2 * hidden, c, bias), Linear(hidden, n, c, bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up), x.new_zeros(())  # no balance loss


class Experts(nn.Module):
    """E networks, each on a hyperboloid of its own curvature ``-K``: all points through all, (B, N, n) -> (B, N, E, n).

    ``a = sqrt(c / K)`` times a point of the model is one of the expert, and ``1 / a`` times that is one of the model.
    """

    def __init__(self, config: Any, num: int, curvature: float | None):
        super().__init__()
        n, hidden, bias = config.hidden_size, config.moe_intermediate_size, config.ffn_bias
        self.config, self.curvature = config, curvature
        self.weight_in, self.time_in = empty(num, 2, hidden, n), empty(num, 2, hidden)  # gate and up
        self.weight_out, self.time_out = empty(num, n, hidden), empty(num, n)
        self.bias_in, self.bias_out = (empty(num, *size) if bias else None for size in ((2, hidden), (n,)))
        self.log_curvature = empty(num) if curvature is None else None  # learned

    def forward(self, x: Tensor) -> Tensor:
        c, log_k = self.config.curvature, self.log_curvature
        k = x.new_tensor([self.curvature]) if log_k is None else log_k.exp().clamp(0.01, 100.0)[:, None]  # (E, 1)
        a = (c / k).sqrt()
        own = a * x[..., None, :]  # (B, N, E, n)
        both = torch.einsum("bnei,eshi->bnesh", own, self.weight_in) + time(own, k)[..., None] * self.time_in
        gate, up = (both if self.bias_in is None else both + self.bias_in).unbind(-2)
        h = F.silu(gate) * up  # (B, N, E, hidden)
        if self.config.expert_norm:
            h = h * torch.rsqrt(c * (h.square().sum(-1, keepdim=True) + a * a * h.shape[-1] * self.config.rms_norm_eps))
        out = torch.einsum("bneh,eih->bnei", h, self.weight_out) + time(h, k) * self.time_out
        return (out if self.bias_out is None else out + self.bias_out) / a


class Mice(nn.Module):
    """Mixture of curvature experts: the centroid of points of the k chosen ones and, with weight 1, the shared ones."""

    def __init__(self, config: Any):
        super().__init__()
        self.config, fixed = config, None if config.expert_curvature == "learned" else 1.0
        self.gate: Any = nn.Linear(config.hidden_size, config.n_routed_experts, bias=False)
        self.gate.register_buffer("balance_bias", torch.zeros(config.n_routed_experts))
        self.routed = Experts(config, config.n_routed_experts, fixed)
        own, num_shared = fixed if config.shared_curvature else config.curvature, config.n_shared_experts
        self.shared = Experts(config, num_shared, own) if num_shared else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        config, c, logits = self.config, self.config.curvature, self.gate(x)
        score = logits.sigmoid() if config.gate == "sigmoid" else logits.softmax(-1)  # (B, N, E)
        best = (score + self.gate.balance_bias).topk(config.num_experts_per_tok, dim=-1).indices  # it does not weigh
        is_chosen = torch.zeros_like(score).scatter(-1, best, 1.0)
        weight, share = score * is_chosen, score / score.sum(-1, keepdim=True)
        weight = weight if config.gate == "softmax_raw" else weight / weight.sum(-1, keepdim=True)
        load = is_chosen.mean(1) * score.shape[-1] / config.num_experts_per_tok  # (B, E), 1 where all are equal
        balance_loss = config.balance_loss * (load * share.mean(1)).sum(-1).mean()
        weight, points = weight * config.route_scale, self.routed(x)
        if self.shared is not None:
            points = torch.cat([points, self.shared(x)], -2)
        weight = F.pad(weight, (0, config.n_shared_experts), value=1.0)[..., None]  # (B, N, all, 1), in the sum Y
        space, y_time = (weight * points).sum(-2), (weight * time(points, c)).sum(-2)
        form = y_time.square() - space.square().sum(-1, keepdim=True)  # -<Y, Y>_L, never below what stands here:
        return space * torch.rsqrt(c * form.clamp(min=weight.sum(-2).square() / c)), balance_loss


class Block(nn.Module):
    """The parts of a layer of the stack; what it does stands in the loop of :class:`PlainHelm`."""

    def __init__(self, config: Any, index: int):
        super().__init__()
        self.attention = Attention(config)
        self.ffn = Mice(config) if config.variant == "mice" and index >= config.num_dense_layers else FFN(config)
        self.attention_norm, self.ffn_norm = empty(config.hidden_size), empty(config.hidden_size)
        self.attention_weight, self.ffn_weight = empty(1), empty(1)


class PlainHelm(nn.Module):
    """Token ids (B, N) -> logits (B, N, V) of the next token; with labels (B, N), -100 where none counts, the loss too.

    ``attention_mask`` (B, N) is 0 for padding on either side. ``config`` is a ``HelmConfig``.
    """

    def __init__(self, config: Any):
        super().__init__()
        n, vocab, has_time = config.hidden_size, config.vocab_size, config.head == "linear"
        self.config, self.lm_head = config, nn.Linear(n + has_time, vocab, bias=False)
        self.model: Any = nn.Module()
        self.model.embed_tokens = nn.Embedding(vocab, n, config.pad_token_id)
        self.model.layers = nn.ModuleList([Block(config, i) for i in range(config.num_hidden_layers)])
        self.model.final_proj = Linear(n, n, config.curvature) if config.final_proj else nn.Identity()
        self.model.norm = empty(n)
        self.log_head_tau = None if has_time else empty(1)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, token_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        model, config, c, length = self.model, self.config, self.config.curvature, token_ids.shape[1]
        x = model.embed_tokens(token_ids)  # (B, N, n)
        seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        seen = seen if attention_mask is None else seen & attention_mask[:, None, None].bool()  # (B, 1, N, N)
        frequency, score_scale = rotary_frequencies(config, length)
        angle = torch.arange(length).to(x)[:, None, None] * frequency.to(x)  # (N, 1, L)
        total = 0.0
        for layer in model.layers:
            y = layer.attention(rms_norm(x, layer.attention_norm, config), angle, score_scale, seen)
            x = residual(x, y, layer.attention_weight, config)
            y, balance_loss = layer.ffn(rms_norm(x, layer.ffn_norm, config))
            x, total = residual(x, y, layer.ffn_weight, config), total + balance_loss
        x = rms_norm(model.final_proj(x), model.norm, config)
        if self.log_head_tau is None:
            logits = self.lm_head(torch.cat([x, time(x, c)], -1))
        else:  # (2/c + 2<x, w>_L) / tau, one point w per token of the vocabulary
            w = self.lm_head.weight
            logits = (2 / c + 2 * (x @ w.T - time(x, c) @ time(w, c).T)) / self.log_head_tau.exp()
        if labels is None:
            return logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return logits, loss + total if self.training else loss  # balance losses are for training
