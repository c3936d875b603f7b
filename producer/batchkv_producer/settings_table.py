"""Every setting of a worker and of the gateway, once: name, flag, variable, default, help.

The table generates the flags of ``batchkv worker`` and ``batchkv run`` with their help, the
variables that ``WorkerSettings`` reads, and the page ``docs/settings.md``
(``tools/settings_page.py``). A new setting is one entry here and one field of ``WorkerSettings``.
"""

from __future__ import annotations

from batchkv_producer.agreed import BLOCK_TOKENS
from batchkv_producer.setting import Setting as Setting
from batchkv_producer.setting import ValueType as ValueType

ADMISSIONS = ("worst", "optimistic")  # how much memory a row's answer gets before it starts
DTYPES = ("auto", "float32", "bfloat16", "float16")
WEIGHTS = ("auto", "packed", "unpacked")
CACHE_WRITES = ("needed", "shared", "all")
_DAY = 86_400
_WEEK = 7 * _DAY


def _seconds(
    name: str, flag: str, default: str, high: int, text: str, about: str, low: float = 0.1
) -> Setting:
    variable = "BATCHKV_" + flag.removeprefix("--").replace("-", "_").upper()
    return Setting(
        name, (variable,), flag, ValueType.NUMBER, default, "", "seconds", low, high,
        metavar="S", help=text, about=about,
    )  # fmt: skip


TABLE = (
    Setting(
        "model", ("BATCHKV_MODEL",), "--model", ValueType.MODEL,
        help="Model to serve: 'demo', a folder, or a Hugging Face name.",
        about="a name, a folder, or `demo`. The flag may be repeated; the variable names one model",
    ),
    Setting(
        "adapters", ("BATCHKV_ADAPTERS",), "--adapter", ValueType.ADAPTERS, is_repeated=True,
        metavar="NAME=FOLDER",
        help="Serve the model with this adapter (LoRA), too. May be repeated.",
        about="adapters (LoRA, DoRA) that the worker serves besides the model alone. Batches name "
        "them. The flag takes one `NAME=FOLDER` and may be repeated",
    ),
    Setting(
        "", ("BATCHKV_REDIS_URL", "BATCHKV_REDIS_URL_FILE"), "--url",
        no_default="the embedded server",
        about="where the queue is. The file keeps the password off command lines. A file with a "
        "password must be closed to others (`chmod 600`)",
    ),
    Setting(
        "", ("BATCHKV_REDIS_CA_FILE",), no_default="the system's authorities",
        about="who signed the certificate of a `rediss://` server (PEM). Other commands read it "
        "too",
    ),
    Setting("", ("BATCHKV_API_KEY",), no_default="none",
            about="the key of commands about batches, for the gateway that `--url http://` names"),
    Setting("", ("BATCHKV_CA_FILE",), no_default="the system's authorities",
            about="who signed that gateway's certificate (PEM)"),
    Setting(
        "kv_scheme", ("BATCHKV_KV_SCHEME",), "--kv-scheme", ValueType.SCHEME, "affine8",
        metavar="SCHEME", help="How keys and values are stored.",
        run_help="How the workers store keys and values: affine8, affine4, k8v4, turbo4, float ...",
        about="how keys and values are stored",
    ),
    Setting(
        "slots", ("BATCHKV_SLOTS",), "--slots", ValueType.WHOLE, "auto", "", "rows", 1, 4096,
        metavar="N", help="Rows that decode at once.",
        run_help="Rows that a worker decodes at once, at most.",
        about="rows that decode at once. `auto` is 32. With more than 16 GB of memory it is 64 on "
        "an M5, on an Ultra and on CUDA. On a Mac with 8 GB it is 16. "
        "`batchkv workers --json` shows the number",
    ),
    Setting(
        "prefetch", ("BATCHKV_PREFETCH",), "--prefetch", ValueType.WHOLE, "auto", "",
        "rows", 0, 4096, metavar="N", help="Rows that wait in the engine for a slot.",
        about="rows that wait in the engine, so that whole groups of prompts can be prefilled when "
        "slots become free. `auto` is two for each slot. Rows that are not started go back when "
        "more urgent rows come, and at the end of the queue when other workers may be idle",
    ),
    Setting(
        "memory_bytes", ("BATCHKV_MEMORY",), "--memory", ValueType.SIZE,
        no_default="from the device", unit="bytes", metavar="SIZE", help="KV memory, like 4GB.",
        run_help="Memory of a worker for keys and values, like 4GB.",
        about="memory for keys and values; an eighth of it stores prefixes",
    ),
    Setting(
        "admission", ("BATCHKV_ADMISSION",), "--admission", ValueType.CHOICE, "optimistic",
        choices=ADMISSIONS, metavar="|".join(ADMISSIONS),
        help="How much free memory a row needs to start.",
        about="`optimistic`: a row starts when the memory of a usual answer fits, and is paused "
        "for a while when memory is short. `worst`: it starts when all of `max_tokens` fits",
    ),
    Setting(
        "prefill_chunk", ("BATCHKV_PREFILL_CHUNK",), "--prefill-chunk", ValueType.WHOLE, "auto", "",
        "tokens", BLOCK_TOKENS, 65_536, BLOCK_TOKENS,
        metavar="TOKENS", help="Prompt tokens computed at once.",
        about="prompt tokens computed at once. `auto` is 512 on a CPU, and measured at start on a "
        "GPU; where 4 s are too short to measure it is 1,024 on Metal and 2,048 on CUDA",
    ),
    Setting(
        "lane_chunk", ("BATCHKV_LANE_CHUNK",), "--lane-chunk", ValueType.WHOLE, "256", "",
        "tokens", BLOCK_TOKENS, 65_536, BLOCK_TOKENS,
        metavar="TOKENS", help="Prompt tokens of batches at once while somebody asks.",
        about="prompt tokens of batches that are computed at once while somebody waits for answers "
        "(`batchkv ask`), and for a minute after. Smaller chunks delay those answers less",
    ),
    Setting(
        "dtype", ("BATCHKV_DTYPE",), "--dtype", ValueType.CHOICE, "auto", choices=DTYPES,
        metavar="|".join(DTYPES), help="The number type that the model computes in.",
        about="the number type that the model computes in. `auto` is float32 on a CPU, else the "
        "type of the weights",
    ),
    Setting(
        "weights", ("BATCHKV_WEIGHTS",), "--weights", ValueType.CHOICE, "auto", choices=WEIGHTS,
        metavar="|".join(WEIGHTS), help="Whether packed weights are unpacked (CUDA).",
        about="`auto`: on CUDA, weights of 4, 8 and other bits are unpacked as they are read, if "
        "the model then takes at most half of the free memory. `packed`: they stay packed, and the "
        "memory is left to keys and values. `unpacked`: they are unpacked in any case, and other "
        "devices refuse it",
    ),
    Setting(
        "wired_limit", ("BATCHKV_WIRED_LIMIT",), "--wired-limit", ValueType.SWITCH, "off",
        metavar="on|off", help="Let MLX wire memory (macOS).",
        about="lets MLX wire memory. Kernel panics were reported with it under continuous batching",
    ),
    Setting(
        "lease_seconds", ("BATCHKV_LEASE_SECONDS",), "--lease-seconds", ValueType.WHOLE, "60", "",
        "seconds", 1, _DAY, metavar="S", help="How long a lost worker keeps its jobs.",
        about="how long a lost worker keeps its rows",
    ),
    _seconds("heartbeat_seconds", "--heartbeat-seconds", "15", _DAY,
             "How often leases are renewed.", "how often leases are renewed"),
    _seconds("maintenance_seconds", "--maintenance-seconds", "30", _DAY,
             "How often lapsed rows are taken back.", "how often lapsed rows are taken back"),
    _seconds("engine_timeout_seconds", "--engine-timeout", "600", _WEEK,
             "A step that takes longer is a hang.",
             "seconds without a step before the worker logs what it was doing and ends"),
    _seconds("load_timeout_seconds", "--load-timeout", "7200", _WEEK,
             "Loading that takes longer is a hang.",
             "seconds for loading the model and the first step, before the worker ends as above"),
    _seconds("drain_seconds", "--drain-seconds", "30", _DAY,
             "How long a stop lets rows finish.",
             "how long a stop lets rows finish; the others go back to the queue", low=0),
    _seconds("stay_seconds", "--stay-seconds", "30", _DAY,
             "How long a model stays, at least, before another takes its place.",
             "how long a model stays after it was loaded, at least, if there are several", low=0),
    Setting(
        "polite", ("BATCHKV_POLITE",), "--polite", ValueType.SWITCH, "off", is_bare=True,
        help="Pause while this machine runs on battery.",
        run_help="Pause while this machine runs on battery.",
        about="pauses while the machine runs on battery. Rows that have not started go back at "
        "once, rows that have started after 60 s, and the machine may sleep. The flag takes no "
        "value",
    ),
    Setting(
        "trace", ("BATCHKV_TRACE",), "--trace", ValueType.FILE, metavar="FILE",
        help="Write a trace of the time of each phase, for Perfetto.  [off]",
        about="a file for a trace: the time of each phase, in Chrome's format. Perfetto and "
        "chrome://tracing show it",
    ),
    Setting(
        "cache", ("BATCHKV_CACHE", "BATCHKV_CACHE_FILE"), "--cache", ValueType.TIERS,
        no_default="off", metavar="TIERS",
        help='Shared prefixes, like "disk:/var/cache/batchkv?max=50GB".',
        about="the tiers of the cache, or a file that names them, because tiers may hold passwords",
    ),
    Setting(
        "", ("BATCHKV_CACHE_SECRET_FILE", "BATCHKV_CACHE_SECRET"),
        about="16 bytes or more that sign blocks. Blocks of others, who do not know them, are "
        "refused. The file must be closed to others (`chmod 600`)",
    ),
    Setting(
        "", ("BATCHKV_CACHE_SALT_FILE", "BATCHKV_CACHE_SALT"), no_default="empty",
        about="workers with another salt share nothing, and learn nothing from each other's hits",
    ),
    Setting(
        "cache_write", ("BATCHKV_CACHE_WRITE",), "--cache-write", ValueType.CHOICE, "needed",
        choices=CACHE_WRITES, metavar="|".join(CACHE_WRITES), help="Which blocks to write.",
        about="the blocks to write. `shared`: prefixes that several rows of a batch have. "
        "`needed`: the same, but to Redis and S3 only what other workers may want and load more "
        "quickly than they compute it. `all`: also the ends of prompts, for later batches with the "
        "same prompts",
    ),
    Setting(
        "reuse_seconds", ("BATCHKV_REUSE_KEEP",), "--reuse-keep", ValueType.DURATION, "7d", "",
        "seconds", 3600, 3650 * _DAY, metavar="TIME",
        help="How long answers of batches with --reuse are remembered.",
        about="how long answers of batches with `--reuse` are remembered, from the time that they "
        "were computed",
    ),
    Setting(
        "reuse_answers", ("BATCHKV_REUSE_MAX_ANSWERS",), "--reuse-max-answers", ValueType.WHOLE,
        "100000", "", "answers", 1, 10_000_000, metavar="N",
        help="The most answers that the server remembers.",
        about="the most answers that the server remembers, for all batches and keys together. The "
        "oldest are deleted",
    ),
    Setting(
        "reuse_bytes", ("BATCHKV_REUSE_MAX",), "--reuse-max", ValueType.SIZE, "100MB", "", "bytes",
        metavar="SIZE", help="The most bytes of answers that the server remembers.",
        about="the most bytes of the remembered answers, as they are compressed. Redis takes about "
        "300 bytes more for each. An answer with more than a sixteenth of them is not remembered",
    ),
    _seconds("cache_lease_seconds", "--cache-lease-seconds", "30", 3600,
             "How long a lost worker keeps a prefix.",
             "how long a lost worker keeps a prefix that it was computing", low=1),
    Setting(
        "cache_audit", ("BATCHKV_CACHE_AUDIT",), "--cache-audit", ValueType.NUMBER, "0", "",
        "a share of the hits", 0, 1, metavar="SHARE", help="Recompute this share of the hits.",
        about="the share of rows with cached tokens that are computed again without them; the log "
        "reports differences",
    ),
    Setting(
        "kv_adopt_float", ("BATCHKV_KV_ADOPT_FLOAT",), "--kv-adopt-float", ValueType.SWITCH, "off",
        metavar="on|off", help="Pack float workers' blocks too.",
        about="packs blocks of `float` workers into this worker's scheme. A row that uses them may "
        "get another answer than without the cache. What it computes is not shared",
    ),
)  # fmt: skip
# Settings of `batchkv serve` (``batchkv_gateway.settings`` reads them).
GATEWAY_TABLE = (
    Setting(
        "host", ("BATCHKV_GATEWAY_HOST",), "--host", ValueType.ADDRESS, "127.0.0.1",
        metavar="ADDRESS", help="The address to listen on.",
        about="the address to listen on. Every address that is not of this machine alone needs a "
        "key (`batchkv keys add`), and TLS or `--plain`",
    ),
    Setting(
        "port", ("BATCHKV_GATEWAY_PORT",), "--port", ValueType.WHOLE, "8080", "", "", 0, 65_535,
        metavar="PORT", help="The port to listen on; 0 is any free one.",
        about="the port to listen on. 0 is any free one, which the first line of output names",
    ),
    Setting(
        "max_file_bytes", ("BATCHKV_GATEWAY_MAX_FILE",), "--max-file", ValueType.SIZE, "200MB", "",
        "bytes", 1, 2**40, metavar="SIZE", help="The largest file that may be uploaded.",
        about="the largest file that may be uploaded",
    ),
    Setting(
        "max_rows", ("BATCHKV_GATEWAY_MAX_ROWS",), "--max-rows", ValueType.WHOLE, "50000", "",
        "rows", 1, 10_000_000, metavar="N", help="The most rows that a batch may have.",
        about="the most rows that a batch may have",
    ),
    Setting(
        "keep_files_seconds", ("BATCHKV_GATEWAY_KEEP_FILES",), "--keep-files", ValueType.DURATION,
        "30d", "", "seconds", 3600, 3650 * _DAY, metavar="TIME",
        help="How long files stay that do not say it themselves, like 12h or 30d.",
        about="how long files stay that do not say it themselves with `expires_after`, and how "
        "long an ended batch is listed",
    ),
    Setting(
        "allow_hosts", ("BATCHKV_GATEWAY_ALLOW_HOST",), "--allow-host", ValueType.OTHER,
        is_repeated=True, metavar="NAME", help="Another name of this gateway. May be repeated.",
        about="names by which clients call the gateway, with commas between them. Addresses, "
        "`localhost` and the machine's own name are always allowed. The flag takes one name and "
        "may be repeated",
    ),
    Setting(
        "cors", ("BATCHKV_GATEWAY_CORS",), "--cors", ValueType.OTHER,
        is_repeated=True, metavar="ORIGIN",
        help="A site whose pages may call the gateway. May be repeated.",
        about="origins like `https://app.example` or `http://localhost:3000`, with commas between "
        "them. Pages of these sites may call the gateway from a browser, with a key but never with "
        "a cookie. `*` is not allowed. The flag takes one origin and may be repeated",
    ),
    Setting(
        "webhooks", ("BATCHKV_GATEWAY_WEBHOOK",), "--webhook", ValueType.OTHER,
        is_repeated=True, metavar="URL",
        help="A URL to call when a batch is over. May be repeated.",
        about="URLs that are called when a batch is over, with commas between them: https, or http "
        "on this machine. It needs a secret. The flag takes one URL and may be repeated",
    ),
    Setting(
        "", ("BATCHKV_WEBHOOK_SECRET_FILE", "BATCHKV_WEBHOOK_SECRET"),
        about="the secret that signs webhooks: `whsec_` and 24 to 64 bytes in base64. The file "
        "must be closed to others (`chmod 600`)",
    ),
    Setting(
        "tls_cert", ("BATCHKV_GATEWAY_TLS_CERT",), "--tls-cert", ValueType.FILE, metavar="FILE",
        help="The certificate (PEM) to serve HTTPS with.",
        about="the certificate (PEM, with its chain) to serve HTTPS with",
    ),
    Setting(
        "tls_key", ("BATCHKV_GATEWAY_TLS_KEY",), "--tls-key", ValueType.FILE, metavar="FILE",
        help="The certificate's private key (PEM).",
        about="the certificate's private key (PEM). The file must be closed to others "
        "(`chmod 600`)",
    ),
    Setting(
        "is_plain", ("BATCHKV_GATEWAY_PLAIN",), "--plain", ValueType.SWITCH, "off", is_bare=True,
        help="Listen without TLS beyond this machine, for a trusted network or a proxy with TLS.",
        about="listens without TLS beyond this machine: for a network that you trust, or a proxy "
        "with TLS. The flag takes no value",
    ),
    Setting(
        "key_rows", ("BATCHKV_GATEWAY_KEY_ROWS",), "--key-rows", ValueType.WHOLE, "0", "", "rows",
        0, 10**9, metavar="N", help="The most rows of a key that may be open at once; 0: any.",
        about="the most rows of one key that may be open at once, which means that they have not "
        "ended. 0 is any number. It is for keys without a `--max-rows` of their own, and not for "
        "admins' keys",
    ),
    Setting(
        "key_bytes", ("BATCHKV_GATEWAY_KEY_BYTES",), "--key-bytes", ValueType.SIZE, "0", "",
        "bytes", 0, 2**50, metavar="SIZE",
        help="The most bytes of files that a key may keep; 0: any.",
        about="the most bytes of files that one key may keep. 0 is any number. It is for keys "
        "without a `--max-bytes` of their own, and not for admins' keys",
    ),
    Setting(
        "is_private", ("BATCHKV_GATEWAY_PRIVATE",), "--private", ValueType.SWITCH, "off",
        is_bare=True, help="Workers share no prefix between two keys.",
        about="workers share no prefix between rows of two keys. So no key learns by "
        "`cached_tokens` or by timing what another sent. Prefixes that several keys send are "
        "computed once for each. `batchkv keys add NAME --private` does it for one key. The flag "
        "takes no value",
    ),
)  # fmt: skip
BY_NAME = {setting.name: setting for setting in TABLE if setting.name}
GATEWAY_BY_NAME = {setting.name: setting for setting in GATEWAY_TABLE if setting.name}
# Variables that other commands read. They may also be set where a worker starts.
OTHER_VARIABLES = ("BATCHKV_HOME", "BATCHKV_DATA")
VARIABLES = frozenset(OTHER_VARIABLES).union(
    *(setting.variables for setting in (*TABLE, *GATEWAY_TABLE))
)
