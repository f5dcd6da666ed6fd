"""The seconds that TCP takes to carry a message in one direction of a link, for the virtual clock.

    seconds = max(8 b o / ((1 - p) r), 8 b / X) + ramp
    X       = 8 s / (R sqrt(2 p / 3) + T min(1, 3 sqrt(3 p / 8)) p (1 + 32 p^2)),     T = R + 0.2 s
    ramp    = g R - w (2^g - 1) t,     t = max(8 s o / ((1 - p) r), 8 s / X)

for b bytes on the stream, a rate of r bits per second, a round trip of R seconds, an overhead of o bytes on
the link for each byte of the stream, a loss p of packets, and segments of s = 1448 bytes. X is the throughput
of TCP, with one acknowledgement per segment and with Linux's minimum timeout T. ramp is the time that slow
start adds: w segments are sent in the first round trip, and twice as many in each further one, until a window
lasts a round trip or the message ends. g is the number of windows before that: the smaller of
ceil(log2(R / (w t))) and ceil(log2(b / (s w) + 1)) - 1, at least 0. With o = 1, p = 0 and infinite w, the
seconds are bit for bit 8 b / r.

References:
    Padhye, Firoiu, Towsley, Kurose 1998: Modeling TCP Throughput. https://doi.org/10.1145/285237.285291
    RFC 5348, section 3.1, has the equation X without the minimum. https://doi.org/10.17487/RFC5348
    Cardwell, Savage, Anderson 2000: Modeling TCP Latency, on slow start.
    https://doi.org/10.1109/INFCOM.2000.832574
    tests/benchmarks/shaped_link.py compares the seconds with those of real connections (docs/devices.md).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SEGMENT = 1448
"""Bytes of the stream in a packet of 1500 bytes: IPv4 takes 20, TCP 20 and TCP's timestamps 12."""
OVERHEAD = 1514 / SEGMENT
"""Bytes on the link for each byte of the stream: a packet of 1500 bytes and an Ethernet header of 14."""
LEAST_TIMEOUT = 0.2
"""The minimum time, in seconds, that Linux adds to a round trip before it resends a packet (TCP_RTO_MIN)."""


def seconds(
    stream_bytes: int | Ints, rate: Floats, rtt: Floats, overhead: Floats, loss: Floats, initcwnd: Floats
) -> Floats:
    """Return the seconds of a message on each link, without the round trip itself, shape (n,).

    Args:
        stream_bytes: bytes of the message on the stream, one number for all links or (n,).
        rate: bits per second, (n,); inf for no limit.
        rtt: seconds of a round trip, (n,).
        overhead: bytes on the link for each byte of the stream, (n,), at least 1.
        loss: probability that a packet is lost, (n,), in [0, 1).
        initcwnd: segments in the first round trip of a message, (n,); inf for all of them at once.
    """
    result: Floats = 8 * stream_bytes * overhead / ((1 - loss) * rate)
    lossy = np.flatnonzero(loss)
    if len(lossy):
        sent = np.broadcast_to(stream_bytes, result.shape)[lossy]
        result[lossy] = np.maximum(result[lossy], 8 * sent / throughput(rtt[lossy], loss[lossy]))
    slow = np.flatnonzero(np.isfinite(initcwnd) & (rtt > 0))
    if len(slow):
        sent = np.broadcast_to(stream_bytes, result.shape)[slow]
        a_segment = np.where(sent > 0, result[slow] * SEGMENT / np.maximum(sent, 1), 0.0)
        result[slow] += _ramp(sent / SEGMENT, a_segment, rtt[slow], initcwnd[slow])
    return result


def throughput(rtt: Floats, loss: Floats) -> Floats:
    """Return X in bits of the stream per second, for a loss above 0."""
    halvings = rtt * np.sqrt(2 * loss / 3)
    timeouts = (rtt + LEAST_TIMEOUT) * np.minimum(1, 3 * np.sqrt(3 * loss / 8)) * loss * (1 + 32 * loss**2)
    result: Floats = 8 * SEGMENT / (halvings + timeouts)
    return result


def _ramp(segments: Floats, a_segment: Floats, rtt: Floats, initcwnd: Floats) -> Floats:
    """Return the seconds that slow start adds. a_segment: the seconds of a segment after the ramp."""
    with np.errstate(divide="ignore"):  # without a limit on the rate, no window lasts a round trip
        until_full = np.ceil(np.log2(rtt / (initcwnd * a_segment)))
    windows = np.ceil(np.log2(segments / initcwnd + 1))
    short = np.maximum(np.minimum(until_full, windows - 1), 0)
    result: Floats = short * rtt - initcwnd * (2**short - 1) * a_segment
    return result
