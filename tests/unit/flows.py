"""An exact maximum flow, as an oracle: small, slow, and unlike anything in the package."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from typing import Any

Node = Hashable


def max_flow(capacity: Mapping[Any, int], source: Node, sink: Node) -> int:
    """The most that flows from source to sink (Edmonds-Karp) over edges with these capacities."""
    left: dict[Node, dict[Node, int]] = {}
    for (tail, head), room in capacity.items():
        left.setdefault(tail, {})[head] = left.get(tail, {}).get(head, 0) + room
        left.setdefault(head, {}).setdefault(tail, 0)
    total = 0
    while True:
        came_from: dict[Node, Node] = {source: source}
        queue = deque([source])
        while queue and sink not in came_from:
            tail = queue.popleft()
            for head, room in left.get(tail, {}).items():
                if room and head not in came_from:
                    came_from[head] = tail
                    queue.append(head)
        if sink not in came_from:
            return total
        path = [sink]
        while path[-1] != source:
            path.append(came_from[path[-1]])
        edges = list(zip(path[1:], path[:-1], strict=True))
        pushed = min(left[tail][head] for tail, head in edges)
        for tail, head in edges:
            left[tail][head] -= pushed
            left[head][tail] += pushed
        total += pushed
