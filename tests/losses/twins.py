"""Plain NumPy twins of the losses, written from the papers over ragged lists.

They import nothing of tunix and use no masks, packing or padding: an update is a list of groups, a
group a list of episodes, an episode a list of tokens that the policy emitted.
"""

import math

import numpy as np


def grpo_advantages(rewards, normalize, epsilon):
    """Section 4.1.2 of arXiv 2402.03300 for one group's list of rewards."""
    mean = sum(rewards) / len(rewards)
    variance = sum((r - mean) ** 2 for r in rewards) / len(rewards)
    scale = math.sqrt(variance) + epsilon if normalize else 1.0
    if max(rewards) == min(rewards):
        return [0.0 for _ in rewards]
    return [(r - mean) / scale for r in rewards]


def grpo_loss(
    groups, *, clip_low, clip_high, beta, estimator, aggregate, constant, normalize, epsilon
):
    """Eq. 3 over groups of episodes, and its gradient with respect to each log-probability.

    An episode is a dictionary: ``reward``, and per token lists ``logp``, ``old``, ``ref``.
    Returns (loss, gradients as a list of lists in the order of the episodes).
    """
    episodes, advantages = [], []
    for group in groups:
        advantages += grpo_advantages([e["reward"] for e in group], normalize, epsilon)
        episodes += group
    number = len(episodes)
    tokens = sum(len(e["logp"]) for e in episodes)
    total, gradients = 0.0, []
    for episode, advantage in zip(episodes, advantages, strict=True):
        length = len(episode["logp"])
        weight = {
            "token_mean": 1 / tokens,
            "sequence_mean": 1 / (number * length),
            "sequence_sum": 1 / (number * constant),
        }[aggregate]
        row = []
        for logp, old, ref in zip(episode["logp"], episode["old"], episode["ref"], strict=True):
            ratio = math.exp(logp - old)
            low, high = 1 - clip_low, 1 + clip_high
            inside = min(max(ratio, low), high)
            if ratio * advantage <= inside * advantage:
                value, slope = -ratio * advantage, -ratio * advantage
            else:
                value, slope = -inside * advantage, 0.0
            d = ref - logp
            kl, kl_slope = {
                "k1": (-d, 1.0),
                "k2": (d * d / 2, -d),
                "k3": (math.exp(d) - 1 - d, 1 - math.exp(d)),
            }[estimator]
            total += weight * (value + beta * kl)
            row.append(weight * (slope + beta * kl_slope))
        gradients.append(row)
    return total, gradients


def sft_loss(rows):
    """Mean over all trained tokens of -log p; rows are lists of log-probabilities."""
    tokens = sum(len(row) for row in rows)
    loss = -sum(sum(row) for row in rows) / tokens
    return loss, [[-1 / tokens for _ in row] for row in rows]


def log_softmax(logits):
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def llama_logits(params, tokens, *, heads, kv_heads, head_dim, theta, epsilon):
    """A Llama forward pass over one plain sequence ``[length]`` in float64, loops over heads."""
    get = {k: np.asarray(v, np.float64) for k, v in params.items() if k != "layers"}
    layers = {k: np.asarray(v, np.float64) for k, v in params["layers"].items()}

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight

    length, half = len(tokens), head_dim // 2
    angle = np.arange(length)[:, None] * theta ** (-np.arange(half) / half)

    def rope(x):
        a, b = x[:, :half], x[:, half:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)

    x = get["embedding"][tokens]
    for i in range(layers["query"].shape[0]):
        w = {k: v[i] for k, v in layers.items()}
        h = norm(x, w["attention_norm"])
        q, k, v = h @ w["query"], h @ w["key"], h @ w["value"]
        mixed = []
        for head in range(heads):
            shared = head // (heads // kv_heads)
            one = rope(q[:, head * head_dim : (head + 1) * head_dim])
            two = rope(k[:, shared * head_dim : (shared + 1) * head_dim])
            scores = one @ two.T / math.sqrt(head_dim)
            scores[np.triu_indices(length, 1)] = -np.inf
            weights = np.exp(log_softmax(scores))
            mixed.append(weights @ v[:, shared * head_dim : (shared + 1) * head_dim])
        x = x + np.concatenate(mixed, axis=1) @ w["output"]
        h = norm(x, w["mlp_norm"])
        gate = h @ w["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["up"])) @ w["down"]
    return norm(x, get["final_norm"]) @ get.get("head", get["embedding"]).T
