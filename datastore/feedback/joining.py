"""Joining: the SQL that finds which decisions, of all that were served, reports may still change.

Over three Arrow tables: `decisions` (narrow), `rewards` (the reports), `written` (served steps).
A client's episode is `e` and its episode_id, or `d` and the id of a decision without one.
"""

from __future__ import annotations

from typing import Final

# decision: each decision, with its step if it is one, and until when what was said of it is there;
# that is not known of a sum, as a part of one may be found later. meant: of reports by other names
# the client's episode, and the decision as far as it can be told here; it may be another where one
# came after it that is no step yet. report: each report with the client's episode that it is of.
# changing: those in which a report may count.
JOIN_SQL: Final = """
CREATE TEMP TABLE decision AS
SELECT d.decision_id AS key, d.episode_id AS source, d.request_id AS request, d.step,
    d."timestamp" AS ts, d.file, coalesce('e' || d.episode_id, 'd' || d.decision_id) AS client,
    w.decision_id IS NULL AS open, w.step AS number, w.episode_id AS episode,
    w.reward, w.terminated, w.truncated, w.since,
    w.reported, w.step = last.step AS is_last,
    CASE WHEN w.reported IS NULL THEN w.since END AS until
FROM decisions d LEFT JOIN written w ON w.decision_id = d.decision_id
LEFT JOIN (SELECT episode_id, max(step) AS step FROM written GROUP BY episode_id) last
    ON last.episode_id = w.episode_id;
CREATE TEMP TABLE client AS
SELECT client, max(ts) FILTER (open) AS last_open FROM decision GROUP BY client;
CREATE TEMP TABLE asked AS
SELECT request_id, "timestamp" AS ts, row FROM rewards
WHERE decision_id IS NULL AND request_id IS NOT NULL;
CREATE TEMP TABLE meant AS
SELECT a.row, d.ts, d.until,
    coalesce(d.client, CASE WHEN n.ts - a.ts <= {elsewhere} THEN n.client END) AS client
FROM asked a
ASOF LEFT JOIN (SELECT request, ts, client, until FROM decision WHERE request IS NOT NULL) d
    ON d.request = a.request_id AND a.ts >= d.ts
ASOF LEFT JOIN (SELECT request, ts, client FROM decision WHERE request IS NOT NULL) n
    ON n.request = a.request_id AND a.ts <= n.ts;
CREATE TEMP TABLE numbered AS
SELECT 'e' || episode_id AS client, step, "timestamp" AS ts, row FROM rewards
WHERE decision_id IS NULL AND request_id IS NULL;
INSERT INTO meant
SELECT n.row, d.ts, d.until, c.client FROM numbered n
LEFT JOIN client c ON c.client = n.client
ASOF LEFT JOIN (SELECT client, number, ts, until FROM decision WHERE number IS NOT NULL) d
    ON d.client = n.client AND d.number = n.step AND n.ts >= d.ts;
CREATE TEMP TABLE report AS
SELECT r.decision_id AS key, r.request_id AS request, r.step, r."timestamp" AS ts, r.row, r.reward,
    r.terminated, r.truncated, r.mode, r.feedback_id, r.final_row,
    coalesce(d.client, m.client) AS client, coalesce(d.until, m.until) AS until, m.ts AS meant_ts
FROM rewards r LEFT JOIN decision d ON d.key = r.decision_id LEFT JOIN meant m ON m.row = r.row;
CREATE TEMP TABLE changing AS
SELECT DISTINCT r.client FROM report r JOIN client c ON c.client = r.client
WHERE (r.until IS NULL OR r.ts > r.until OR c.last_open > r.meant_ts)
    AND (r.key IS NOT NULL OR r.ts < {horizon})
"""

# The decisions of client episodes in which a report may count, and all reports on them.
ACTIVE_SQL: Final = """
SELECT client, source, key, ts, request, step, file,
    reward, terminated, truncated, episode, number, is_last, since, reported
FROM decision SEMI JOIN changing USING (client) ORDER BY key
"""
ACTIVE_REPORTS_SQL: Final = """
SELECT key, CASE WHEN key IS NULL THEN client END, request, step, mode, ts, row,
    reward, terminated, truncated, feedback_id, final_row
FROM report SEMI JOIN changing USING (client)
WHERE key IS NOT NULL OR ts < {horizon} ORDER BY ts, row
"""

# Of the other episodes: decisions that wait for a report, that none came for, and that were asked
# for again; then the steps of all, and reports by other names whose decision never came.
LEFT_SQL: Final = """
WITH left_over AS (
    SELECT * FROM decision ANTI JOIN changing USING (client)
), idle AS (
    SELECT client, count(*) FILTER (open) AS num, max(ts) AS ts FROM left_over GROUP BY client
), again AS (
    SELECT o.client, count(*) AS num FROM left_over o
    JOIN (SELECT DISTINCT client, request FROM left_over WHERE NOT open) s
        ON s.client = o.client AND s.request = o.request
    WHERE o.open GROUP BY o.client
), counted AS (
    SELECT i.num - coalesce(a.num, 0) AS num, coalesce(a.num, 0) AS again,
        i.ts >= {closing} OR i.ts >= {horizon} AS waits
    FROM idle i LEFT JOIN again a USING (client)
)
SELECT coalesce(sum(num) FILTER (waits), 0)::BIGINT,
    coalesce(sum(num) FILTER (NOT waits), 0)::BIGINT, coalesce(sum(again), 0)::BIGINT,
    (SELECT count(*) FROM decision WHERE NOT open),
    (SELECT count(*) FROM report WHERE key IS NULL AND client IS NULL AND ts < {closing}),
    (SELECT count(*) FROM report WHERE key IS NULL AND ts >= {horizon})
FROM counted
"""
