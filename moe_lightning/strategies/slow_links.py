"""Slow links: which host's connections to all others are slower than those between the others.

All ranks wait for a slow link alike, so that own times do not show whose it is. Linux measures the round trip of each
TCP connection, and counts what is sent again. Three hosts are needed to see of which two a link is slow.
"""

from __future__ import annotations

import socket
import statistics
import struct
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import NamedTuple

from moe_lightning.parallel.abort import duplicate, open_connections

SLOW_RATIO = 2.0
"""Fastest round trip of a host over the median of those between the others, from which it is slow."""

_LOSS = 0.01  # of segments, from which a link loses packets
_FEW = 10  # segments that are sent again: fewer say nothing
_TCP_INFO = struct.Struct("68xI28xI52xI")  # <linux/tcp.h>: tcpi_rtt, tcpi_total_retrans, tcpi_data_segs_out


class Link(NamedTuple):
    """Connections of a process with another host.

    Attributes:
        local, peer: addresses.
        rtt_s: median of their round trips.
        sent, resent: segments with data.
    """

    local: str
    peer: str
    rtt_s: float
    sent: int
    resent: int


def own_links() -> list[Link]:
    """Return the connections of this process with other hosts; none where they run on no sockets of this process, or
    the platform does not measure them.
    """
    found: dict[tuple[str, str], list[tuple[int, int, int]]] = {}
    for each in open_connections() if sys.platform == "linux" else ():
        ends = each.local[0], each.peer[0]
        if ends[0] == ends[1] or (connection := duplicate(each.descriptor)) is None:
            continue
        with closing(connection), suppress(OSError, struct.error):  # it was closed meanwhile, or an older kernel
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            found.setdefault(ends, []).append(_TCP_INFO.unpack(info))
    links = []
    for ends, values in found.items():
        rtts, resent, sent = zip(*values, strict=True)
        links.append(Link(*ends, statistics.median(rtts) / 1e6, sum(sent), sum(resent)))
    return links


def since(before: Sequence[Link], now: Sequence[Link]) -> list[Link]:
    """Return links with what was sent since an earlier look; all of it where connections are others."""
    earlier = {(link.local, link.peer): link for link in before}
    found = []
    for link in now:
        last = earlier.get((link.local, link.peer))
        if last is not None and last.sent <= link.sent and last.resent <= link.resent:
            link = link._replace(sent=link.sent - last.sent, resent=link.resent - last.resent)
        found.append(link)
    return found


@dataclass(frozen=True, kw_only=True)
class SlowHost:
    """A host with a slow link.

    Attributes:
        ranks: on it.
        address: of it.
        rtt_s, usual_rtt_s: its fastest round trip, and the median of those between the others.
        loss, usual_loss: the same of the share of segments that are sent again.
    """

    ranks: Sequence[int]
    address: str
    rtt_s: float
    usual_rtt_s: float
    loss: float
    usual_loss: float

    @property
    def loses(self) -> bool:
        """True if it loses packets that others do not."""
        return self.loss > max(_LOSS, 4 * self.usual_loss)

    def __str__(self) -> str:
        who = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))} ({self.address})"
        parts = []
        if self.rtt_s > SLOW_RATIO * self.usual_rtt_s:
            usual_ms = 1e3 * self.usual_rtt_s
            parts.append(f"round trips take {1e3 * self.rtt_s:.1f} ms, between the others {usual_ms:.1f} ms")
        if self.loses:
            parts.append(f"{100 * self.loss:.1f} % is sent again, between the others {100 * self.usual_loss:.1f} %")
        return f"the link of {who}: {'; '.join(parts)}"


def slowest_host(links: Sequence[Sequence[Link]]) -> SlowHost | None:
    """Return the host whose connections are all slower than those between the others; None if there is none.

    Args:
        links: of each rank.
    """
    ranks: dict[str, list[int]] = {}
    for rank, own in enumerate(links):
        for address in dict.fromkeys(link.local for link in own):
            ranks.setdefault(address, []).append(rank)
    between: dict[frozenset[str], list[Link]] = {}
    for link in (link for own in links for link in own if link.peer in ranks):
        between.setdefault(frozenset((link.local, link.peer)), []).append(link)
    found = []
    for address, on_it in ranks.items():
        own_pairs = [pair for ends, pair in between.items() if address in ends]
        others = [pair for ends, pair in between.items() if address not in ends]
        if own_pairs and others:
            host = SlowHost(
                ranks=on_it,
                address=address,
                rtt_s=min(link.rtt_s for pair in own_pairs for link in pair),
                usual_rtt_s=statistics.median(link.rtt_s for pair in others for link in pair),
                loss=min(map(_loss, own_pairs)),
                usual_loss=statistics.median(map(_loss, others)),
            )
            if host.loses or host.rtt_s > SLOW_RATIO * host.usual_rtt_s:
                found.append(host)
    return max(found, key=lambda host: (host.rtt_s, host.loss), default=None)


def _loss(links: Sequence[Link]) -> float:
    """Return the share of segments between two hosts that are sent again, of the direction with more of them."""
    found = [0.0]
    for address in {link.local for link in links}:
        one_way = [link for link in links if link.local == address]
        resent = sum(link.resent for link in one_way)
        found.append(resent / max(1, sum(link.sent for link in one_way)) if resent >= _FEW else 0.0)
    return max(found)
