-- Preference pairs from transcripts: of the samples of one prompt in a group, the best and the worst.
--
--   replaylake ingest examples/data/transcripts/results.json --dataset chats
--   replaylake sql --file examples/preferences.sql --output pairs.jsonl
--
-- A line of pairs.jsonl is {"prompt": [messages], "chosen": [messages], "rejected": [messages], ...}.
-- Of another dataset, or at a version: --at chats=NAME@VERSION. A sample whose rewards are not all
-- known gives no pair, nor does a prompt whose samples all have the same return.
WITH parts AS (
    SELECT episode_id, env_step, 0 AS place, prompt_messages AS messages FROM chats.steps
    UNION ALL
    SELECT episode_id, env_step, 1 AS place, completion_messages AS messages FROM chats.steps
),
said AS (
    SELECT episode_id,
           env_step = 0 AND place = 0 AS is_prompt,
           flatten(list(from_json(messages, '[{
               "role": "VARCHAR", "content": "VARCHAR", "name": "VARCHAR", "tool_call_id": "VARCHAR",
               "tool_calls": [{"id": "VARCHAR", "type": "VARCHAR",
                               "function": {"name": "VARCHAR", "arguments": "VARCHAR"}}]
           }]') ORDER BY env_step, place)) AS messages
    FROM parts
    GROUP BY ALL
),
samples AS (
    SELECT steps.group_id, games.source_episode_id AS id, games."return" AS reward,
           prompt.messages AS prompt, answer.messages AS answer
    FROM chats.games
    JOIN chats.steps ON steps.episode_id = games.episode_id AND steps.env_step = 0
    JOIN said AS prompt ON prompt.episode_id = games.episode_id AND prompt.is_prompt
    JOIN said AS answer ON answer.episode_id = games.episode_id AND NOT answer.is_prompt
    WHERE games."return" IS NOT NULL
),
ranked AS (
    SELECT *,
           row_number() OVER (PARTITION BY group_id, prompt ORDER BY reward DESC, id) AS best,
           row_number() OVER (PARTITION BY group_id, prompt ORDER BY reward, id) AS worst
    FROM samples
)
SELECT b.prompt, b.answer AS chosen, w.answer AS rejected,
       b.reward AS chosen_reward, w.reward AS rejected_reward,
       b.group_id, b.id AS chosen_id, w.id AS rejected_id
FROM ranked AS b
JOIN ranked AS w ON b.group_id = w.group_id AND b.prompt = w.prompt
WHERE b.best = 1 AND w.worst = 1 AND b.reward > w.reward
ORDER BY b.group_id, b.id
