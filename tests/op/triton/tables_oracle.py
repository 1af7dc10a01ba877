"""Routing tables by plain Python, from every rank's expert ids: what routing.py's kernels have to fill."""

import torch

TILE = 128


def tables(all_ids: list[torch.Tensor], scores: list[torch.Tensor], rank: int, local_experts: int, t_max: int) -> dict:
    """all_ids, scores: per rank (T, K). Returns Python lists; keys as routing.Tables, without what is undefined."""
    ep, K = len(all_ids), all_ids[0].shape[1]
    by_expert: list[list[tuple[int, int, int, int]]] = [[] for _ in range(local_experts)]
    for d in range(ep):
        source = (rank + d) % ep
        for t in range(all_ids[source].shape[0]):
            for k in range(K):
                expert = int(all_ids[source][t, k]) - rank * local_experts
                if 0 <= expert < local_experts:
                    by_expert[expert].append((d, source, t, k))
    rows, row_scores, row_of, expert_rows, tiles = {}, {}, {}, [], []
    start = 0
    for expert, entries in enumerate(by_expert):
        expert_rows += [start, len(entries)]
        for i, (_, source, t, k) in enumerate(entries):
            rows[start + i] = source * t_max + t
            row_scores[start + i] = float(scores[source][t, k])
            row_of[(source * t_max + t) * K + k] = start + i
        padded = -(-len(entries) // TILE) * TILE
        for i in range(len(entries), padded):
            rows[start + i], row_scores[start + i] = -1, 0.0
        for j in range(padded // TILE):
            last = min((j + 1) * TILE, len(entries)) - 1
            tiles.append((entries[last][0], expert, j, start + j * TILE, min(len(entries) - j * TILE, TILE)))
        start += padded
    tiles.sort(key=lambda tile: tile[:3])
    return {
        "rows": rows,
        "scores": row_scores,
        "row_of": row_of,
        "expert_rows": expert_rows,
        "tiles": [[expert, row, valid, d] for d, expert, _, row, valid in tiles],
        "tiles_of": [sum(tile[0] == d for tile in tiles) for d in range(ep)],
        "tokens": [ids.shape[0] for ids in all_ids],
    }
