"""Llama's decoder layer and rotation in NumPy, written from the equations: full matrices, no cache."""

import numpy as np


def silu(x):
    return x / (1 + np.exp(-x))


def numpy_norm(scale, x, eps=1e-5):
    """RMSNorm."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def rope(x, theta):
    """x [T, N, H]: halves turned by position / theta^(2i / H)."""
    T, _, H = x.shape
    angle = np.arange(T)[:, None] / theta ** (np.arange(0, H, 2) / H)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., : H // 2], x[..., H // 2 :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def llama3_divisors(c):
    """One divisor a rotary frequency, as the paper's code (`apply_scaling`) finds them."""
    found = []
    for i in range(c.head_dim // 2):
        wavelength = 2 * np.pi * c.rope_theta ** (2 * i / c.head_dim)
        if wavelength < c.rope_original_max_position / c.rope_high_freq_factor:
            found.append(1.0)
        elif wavelength > c.rope_original_max_position / c.rope_low_freq_factor:
            found.append(c.rope_factor)
        else:
            smooth = c.rope_original_max_position / wavelength - c.rope_low_freq_factor
            smooth /= c.rope_high_freq_factor - c.rope_low_freq_factor
            found.append(1 / ((1 - smooth) / c.rope_factor + smooth))
    return np.array(found)


def queries_keys_values(config, weight, read):
    """What attention makes of the rows [T, ...] it reads; keys and values repeated for every query head."""
    T, R = len(read), config.n_heads // config.n_kv_heads
    q, k, v = (
        (read @ weight(f"self_attn.{name}_proj")).reshape(T, -1, config.head_dim)
        for name in "qkv"
    )
    q, k = (rope(y, config.rope_theta) for y in (q, k))
    return q, k.repeat(R, 1), v.repeat(R, 1)


def decoder_layer(config, weight, x, read=None):
    """A layer over one text [T, D].

    Args:
      weight: name, such as "self_attn.q_proj", to a kernel [in, out] or a norm's scale; None for
        an input norm that does not exist.
      read: what attention reads in place of the normed x.
    """
    T = len(x)
    first = weight("input_layernorm") if read is None else None
    normed = x if first is None else numpy_norm(first, x, config.rms_eps)
    normed = normed if read is None else read
    q, k, v = queries_keys_values(config, weight, normed)
    scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(config.head_dim)
    scores = np.where(np.tril(np.ones((T, T), bool)), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("nts,snh->tnh", p / p.sum(-1, keepdims=True), v).reshape(T, -1)
    x = x + mixed @ weight("self_attn.o_proj")
    normed = numpy_norm(weight("post_attention_layernorm"), x, config.rms_eps)
    gated = silu(normed @ weight("mlp.gate_proj")) * (normed @ weight("mlp.up_proj"))
    return x + gated @ weight("mlp.down_proj")


def numpy_layer(params, config, x, read=None):
    """`decoder_layer` with parameters of ours."""
    return decoder_layer(config, weight_of(params), x, read)


def weight_of(params):
    """Name -> kernel or scale of parameters of ours."""

    def weight(name):
        leaf = params
        for part in name.split("."):
            leaf = leaf.get(part, {})
        return leaf.get("kernel", leaf.get("scale"))

    return weight
