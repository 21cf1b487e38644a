-- Fences the rows of @table@. A write presents its token in the column "fence"; triggers compare it
-- with the highest token of the row, move it to "fence_token" and clear "fence". A DELETE presents
-- it in @marks@ first, in the same transaction:
--   INSERT INTO @marks@ (resource, fence) VALUES (KEY, TOKEN)
--     ON CONFLICT (resource) DO UPDATE SET fence = excluded.fence;
-- A write without a token, or with a lower one, fails.

ALTER TABLE @table@ ADD COLUMN fence INTEGER;        -- presented; NULL at rest
ALTER TABLE @table@ ADD COLUMN fence_token INTEGER;  -- the highest that was accepted

-- The tokens of rows that were deleted: a row that comes back starts above them. To forget a key
-- that is never used again, delete its mark.
CREATE TABLE @marks@ (
  resource    TEXT PRIMARY KEY NOT NULL,
  fence       INTEGER,
  fence_token INTEGER
);

-- The condition leaves out the change by which the triggers below move a token: at rest there is
-- none to move.
CREATE TRIGGER @on_update@ BEFORE UPDATE ON @table@
WHEN NOT (OLD.fence IS NOT NULL AND NEW.fence IS NULL AND NEW.fence_token IS OLD.fence)
BEGIN
  SELECT RAISE(ABORT, 'missing fencing token') WHERE NEW.fence IS NULL;
  SELECT RAISE(ABORT, 'not a fencing token')
    WHERE typeof(NEW.fence) <> 'integer' OR NEW.fence < 1;
  SELECT RAISE(ABORT, 'stale fencing token') WHERE NEW.fence @older@ OLD.fence_token;
  SELECT RAISE(ABORT, 'the key of a fenced row can''t change: delete it and insert another')
    WHERE @key_changed@;
END;

CREATE TRIGGER @after_update@ AFTER UPDATE ON @table@ WHEN NEW.fence IS NOT NULL
BEGIN
  UPDATE @table@ SET fence_token = NEW.fence, fence = NULL WHERE @is_new@;
END;

-- INSERT OR REPLACE removes a row without asking the trigger for deletes.
CREATE TRIGGER @on_insert@ BEFORE INSERT ON @table@
BEGIN
  SELECT RAISE(ABORT, 'missing fencing token') WHERE NEW.fence IS NULL;
  SELECT RAISE(ABORT, 'not a fencing token')
    WHERE typeof(NEW.fence) <> 'integer' OR NEW.fence < 1;
  SELECT RAISE(ABORT, 'stale fencing token') FROM @table@ AS r
    WHERE @is_new_r@ AND NEW.fence @older@ r.fence_token;
END;

-- The key may be chosen by the database, and is known only now.
CREATE TRIGGER @after_insert@ AFTER INSERT ON @table@
BEGIN
  SELECT RAISE(ABORT, 'a fenced row needs a key') WHERE @new_key_missing@;
  SELECT RAISE(ABORT, 'stale fencing token') FROM @marks@
    WHERE resource = @new_key@ AND NEW.fence @older@ fence_token;
  UPDATE @table@ SET fence_token = NEW.fence, fence = NULL WHERE @is_new@;
END;

CREATE TRIGGER @on_delete@ BEFORE DELETE ON @table@
BEGIN
  SELECT RAISE(ABORT, 'missing fencing token') WHERE NOT EXISTS
    (SELECT 1 FROM @marks@ WHERE resource = @old_key@ AND fence IS NOT NULL);
  SELECT RAISE(ABORT, 'not a fencing token') FROM @marks@
    WHERE resource = @old_key@ AND (typeof(fence) <> 'integer' OR fence < 1);
  SELECT RAISE(ABORT, 'stale fencing token') FROM @marks@
    WHERE resource = @old_key@ AND (fence @older@ OLD.fence_token OR fence < fence_token);
  UPDATE @marks@ SET fence_token = fence, fence = NULL WHERE resource = @old_key@;
END;
