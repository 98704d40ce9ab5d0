"""Migrations of the database schema, in order.

Migration i takes `user_version` from i to i + 1. New migrations are added at the end. Released ones
are never edited, since existing databases have gone through them.
"""

from __future__ import annotations

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE facts (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT",
        """CREATE TABLE nodes (
            name TEXT PRIMARY KEY,
            address TEXT NOT NULL,
            added_s REAL NOT NULL
        ) STRICT""",
        """CREATE TABLE runs (
            run_id TEXT PRIMARY KEY,
            name TEXT NOT NULL,
            state TEXT NOT NULL,
            spec TEXT NOT NULL,
            attempt INTEGER NOT NULL,
            nodes TEXT NOT NULL,
            message TEXT NOT NULL,
            hint TEXT NOT NULL,
            created_s REAL NOT NULL,
            started_s REAL,
            ended_s REAL,
            stop_asked INTEGER NOT NULL,
            progress TEXT NOT NULL
        ) STRICT""",
        """CREATE TABLE attempts (
            run_id TEXT NOT NULL REFERENCES runs ON DELETE CASCADE,
            attempt INTEGER NOT NULL,
            placements TEXT NOT NULL,
            resume_step INTEGER,
            launched_s REAL NOT NULL,
            inputs TEXT NOT NULL,
            PRIMARY KEY (run_id, attempt)
        ) STRICT""",
        """CREATE TABLE run_events (
            id INTEGER PRIMARY KEY,
            run_id TEXT NOT NULL REFERENCES runs ON DELETE CASCADE,
            time_s REAL NOT NULL,
            severity TEXT NOT NULL,
            text TEXT NOT NULL
        ) STRICT""",
        "CREATE INDEX run_events_by_run ON run_events (run_id, id)",
        # Nodes that were off report deleted runs later, which these ids keep out.
        "CREATE TABLE deleted_runs (run_id TEXT PRIMARY KEY, deleted_s REAL NOT NULL) STRICT",
        """CREATE TABLE file_hashes (
            path TEXT PRIMARY KEY,
            size_bytes INTEGER NOT NULL,
            modified_ns INTEGER NOT NULL,
            sha256 TEXT NOT NULL
        ) STRICT""",
    ),
    (
        """CREATE TABLE calibrations (
            node TEXT NOT NULL,
            device_id TEXT NOT NULL,
            measured_s REAL NOT NULL,
            figures TEXT NOT NULL,
            PRIMARY KEY (node, device_id)
        ) STRICT""",
        # One row per direction: node to peer.
        """CREATE TABLE links (
            node TEXT NOT NULL,
            peer TEXT NOT NULL,
            measured_s REAL NOT NULL,
            round_trip_s REAL NOT NULL,
            bytes_per_s REAL,
            PRIMARY KEY (node, peer)
        ) STRICT""",
        """CREATE TABLE data_sizes (
            data_key TEXT PRIMARY KEY,
            num_rows INTEGER NOT NULL,
            num_tokens INTEGER NOT NULL,
            longest_tokens INTEGER NOT NULL,
            counted_s REAL NOT NULL
        ) STRICT""",
        """CREATE TABLE forecasts (
            run_id TEXT NOT NULL REFERENCES runs ON DELETE CASCADE,
            attempt INTEGER NOT NULL,
            forecast TEXT NOT NULL,
            measured TEXT,
            PRIMARY KEY (run_id, attempt)
        ) STRICT""",
        # Without a reference to runs, since outcomes stay when their run is deleted.
        """CREATE TABLE outcomes (
            run_id TEXT NOT NULL,
            attempt INTEGER NOT NULL,
            rank INTEGER NOT NULL,
            ended_s REAL NOT NULL,
            outcome TEXT NOT NULL,
            PRIMARY KEY (run_id, attempt, rank)
        ) STRICT""",
    ),
    (
        """CREATE TABLE artifacts (
            name TEXT NOT NULL,
            version INTEGER NOT NULL,
            content_sha256 TEXT NOT NULL,
            about TEXT NOT NULL,
            measured TEXT,
            created_s REAL NOT NULL,
            PRIMARY KEY (name, version)
        ) STRICT""",
        """CREATE TABLE artifact_copies (
            name TEXT NOT NULL,
            version INTEGER NOT NULL,
            kind TEXT NOT NULL,
            place TEXT NOT NULL,
            path TEXT NOT NULL,
            made_s REAL NOT NULL,
            checked_s REAL,
            state TEXT NOT NULL,
            problem TEXT NOT NULL,
            PRIMARY KEY (name, version, kind, place),
            FOREIGN KEY (name, version) REFERENCES artifacts ON DELETE CASCADE
        ) STRICT""",
    ),
    (
        """CREATE TABLE prompt_sets (
            base TEXT NOT NULL,
            data TEXT NOT NULL,
            prompts TEXT NOT NULL,
            PRIMARY KEY (base, data)
        ) STRICT""",
        """CREATE TABLE comparisons (
            id INTEGER PRIMARY KEY,
            base TEXT NOT NULL,
            data TEXT NOT NULL,
            comparison TEXT NOT NULL
        ) STRICT""",
        "CREATE INDEX comparisons_by_project ON comparisons (base, data, id)",
    ),
    (
        """CREATE TABLE recoveries (
            run_id TEXT NOT NULL REFERENCES runs ON DELETE CASCADE,
            attempt INTEGER NOT NULL,
            cause TEXT NOT NULL,
            step INTEGER NOT NULL,
            ended_s REAL NOT NULL,
            state TEXT NOT NULL,
            resumed_s REAL,
            resumed_attempt INTEGER,
            PRIMARY KEY (run_id, attempt)
        ) STRICT""",
    ),
    ("ALTER TABLE recoveries ADD COLUMN reason TEXT NOT NULL DEFAULT ''",),
    # A JSON object; empty: not known yet.
    ("ALTER TABLE nodes ADD COLUMN identity TEXT NOT NULL DEFAULT '{}'",),
    ("ALTER TABLE attempts ADD COLUMN taken TEXT NOT NULL DEFAULT ''",),
    (
        """CREATE TABLE chunk_lists (
            sha256 TEXT PRIMARY KEY,
            size_bytes INTEGER NOT NULL,
            chunks TEXT NOT NULL
        ) STRICT""",
    ),
    (
        # 1: a mandate of its master is signed.
        "ALTER TABLE attempts ADD COLUMN is_signed INTEGER NOT NULL DEFAULT 0",
        # Runs that nodes listed: with the key of their master once the user has taken them in.
        "CREATE TABLE trusted_runs (run_id TEXT PRIMARY KEY, key TEXT NOT NULL) STRICT",
        "CREATE TABLE ignored_runs (run_id TEXT, node TEXT, PRIMARY KEY (run_id, node)) STRICT",
    ),
    # A JSON object; empty: never stopped.
    ("ALTER TABLE runs ADD COLUMN last_stop TEXT NOT NULL DEFAULT '{}'",),
    (
        """CREATE TABLE plans (
            spec_key TEXT PRIMARY KEY,
            shown_s REAL NOT NULL,
            document TEXT NOT NULL
        ) STRICT""",
    ),
)
