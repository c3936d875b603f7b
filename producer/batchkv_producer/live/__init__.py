"""Asks workers for answers that somebody waits for, and reads them as they are made."""

from batchkv_producer.live.answer import Answer as Answer
from batchkv_producer.live.answer import LostAnswerError as LostAnswerError
from batchkv_producer.live.answer import Piece as Piece
from batchkv_producer.live.lane import Lane as Lane
from batchkv_producer.live.lane import LaneRefusedError as LaneRefusedError
from batchkv_producer.live.lane import Question as Question
