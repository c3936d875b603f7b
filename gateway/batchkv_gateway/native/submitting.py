"""Submits, plans and retries for a caller, by the functions of the commands."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from batchkv_gateway.errors import CONFLICT, TOO_LARGE, ApiError
from batchkv_gateway.keys.caller import Caller, salt_of
from batchkv_gateway.native.owners import Owners, identity_of
from batchkv_gateway.parts import Parts
from batchkv_producer.client import Client
from batchkv_producer.intake.source import Inputs
from batchkv_producer.remote.terms import Terms
from batchkv_producer.submit import restore, submission
from batchkv_producer.submit.kept_answers import EarlierBatch
from batchkv_producer.wire.batch_options import NEVER
from batchkv_producer.wire.job import NO_PARAMS


class Submitting:
    """The work of these routes, in threads."""

    def __init__(self, parts: Parts) -> None:
        self._connection, self._settings, self._quotas = (
            parts.connection,
            parts.settings,
            parts.quotas,
        )
        self._client, self._owners = Client(parts.connection), Owners(parts.connection)

    def submit(self, caller: Caller, terms: Terms, inputs: Inputs) -> dict[str, Any]:
        """Queue an input. The same input again joins its batch."""
        earlier, num_rows = None, 0
        if terms.source_batch:
            found = self._owners.find(caller, terms.source_batch)
            earlier = EarlierBatch(self._client.status(found.batch_id).batch_id)

        def counted(total: int) -> None:
            nonlocal num_rows
            self._refuse_large(total)
            num_rows = total

        def identified(batch_id: str, _: str, relatives: frozenset[str]) -> None:
            is_mended = earlier is not None and earlier.num_alike > 0
            if terms.out_batch and not is_mended and terms.out_batch not in {batch_id, *relatives}:
                raise ApiError(
                    CONFLICT,
                    f"the results that you have are of batch {terms.out_batch}, and this input is "
                    f"batch {batch_id}",
                    code="other_batch",
                    param=batch_id,
                )
            self._quotas.reserve_rows(caller, batch_id, num_rows)
            self._owners.add(caller, batch_id)

        submitted = submission.submit(
            self._connection,
            inputs,
            model=terms.model,
            default_model=terms.default_model,
            defaults=terms.defaults,
            job_timeout_seconds=terms.timeout_seconds,
            name=terms.name,
            options=replace(_checked_options(terms).options, reuse_scope=caller.owner),
            prompting=terms.prompting,
            earlier=earlier,
            identity=identity_of(caller.owner),
            cache_salt=caller.cache_salt,
            on_counted=counted,
            on_identified=identified,
        )
        return {"submitted": asdict(submitted), "earlier": asdict(earlier) if earlier else None}

    def plan(self, caller: Caller, terms: Terms, inputs: Inputs) -> dict[str, Any]:
        """Read and check an input, and estimate its prefix hits. Nothing is queued."""
        checked, estimate = submission.survey(
            inputs,
            model=terms.model,
            default_model=terms.default_model,
            defaults=terms.defaults,
            prompting=terms.prompting,
        )
        self._refuse_large(checked.total)
        if identity_of(caller.owner):
            checked = replace(checked, batch_id="")  # it has another id with this key
        return {"checked": asdict(checked), "estimate": asdict(estimate)}

    def retry(
        self, caller: Caller, batch_id: str, terms: Terms, source: Inputs | None
    ) -> dict[str, Any]:
        """Queue failed rows again."""
        status = self._client.status(batch_id)
        self._quotas.reserve_rows(caller, batch_id, status.total)
        num = restore.retry_batch(
            self._connection,
            status,
            source,
            defaults=None if terms.defaults == NO_PARAMS else terms.defaults,
            canceled=terms.canceled,
            job_timeout_seconds=terms.job_timeout_seconds,
            expires=terms.options.expires,
            origin=self._origin(caller, batch_id),
        )
        return {"queued": num}

    def _origin(self, caller: Caller, batch_id: str) -> restore.Origin:
        """How a batch was submitted. Another owner may be private, so its salt is always used."""
        owner = self._owners.owner_of(batch_id)
        salt = caller.cache_salt if owner in ("", caller.owner) else salt_of(owner)
        return restore.Origin(identity_of(owner), salt)

    def _refuse_large(self, num_rows: int) -> None:
        """Raise ApiError for more rows than this gateway allows."""
        most = self._settings.max_rows
        if num_rows > most:
            raise ApiError(
                TOO_LARGE,
                f"the input has {num_rows:,} rows, and this gateway allows {most:,}: split it, or "
                "ask the operator for a larger --max-rows",
                code="too_many_rows",
            )


def _checked_options(terms: Terms) -> Terms:
    """The options without the deadline that only a retry can have."""
    if terms.options.expires == NEVER:
        return replace(terms, options=replace(terms.options, expires=None))
    return terms
