"""Live rows of one worker: rows that somebody waits for."""

from batchkv_worker.queue.live.lane import LiveLane as LiveLane
