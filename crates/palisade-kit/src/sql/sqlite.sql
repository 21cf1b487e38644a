-- @marks@ has the tokens of rows that were deleted: a row that comes back starts above them. Several
-- marks of one key are fine, the highest counts. Its columns have the affinities of the table's, and
-- triggers compare by the collations of the table's columns, which an index must have to be used. To
-- forget a key that is never used again, delete its marks.
CREATE TABLE IF NOT EXISTS @marks@ AS
  SELECT @table_columns@, CAST(0 AS INTEGER) AS fence_token FROM @table@ WHERE 0;
CREATE INDEX IF NOT EXISTS @marks_binary@ ON @marks@ (@columns_binary@);
CREATE INDEX IF NOT EXISTS @marks_nocase@ ON @marks@ (@columns_nocase@);
CREATE INDEX IF NOT EXISTS @marks_rtrim@ ON @marks@ (@columns_rtrim@);

-- The marks of an earlier palisade, by the text of their keys: each way to read one counts.
CREATE TABLE IF NOT EXISTS @old_marks@ (
  resource    TEXT PRIMARY KEY NOT NULL,
  fence       INTEGER,
  fence_token INTEGER
);
@carry_over@DROP TABLE @old_marks@;

-- The condition leaves out the change by which the triggers below move a token: at rest there is
-- none to move.
DROP TRIGGER IF EXISTS @on_update@;
CREATE TRIGGER @on_update@ BEFORE UPDATE ON @table@
WHEN NOT (OLD.fence IS NOT NULL AND NEW.fence IS NULL AND NEW.fence_token IS OLD.fence)
BEGIN
  SELECT RAISE(ABORT, 'missing fencing token') WHERE NEW.fence IS NULL;
  SELECT RAISE(ABORT, 'not a fencing token')
    WHERE typeof(NEW.fence) <> 'integer' OR NEW.fence = 0;
  SELECT RAISE(ABORT, 'stale fencing token') WHERE abs(NEW.fence) @older@ OLD.fence_token;
  SELECT RAISE(ABORT, 'the key of a fenced row can''t change: delete it and insert another')
    WHERE @key_changed@;
END;

DROP TRIGGER IF EXISTS @after_update@;
CREATE TRIGGER @after_update@ AFTER UPDATE ON @table@ WHEN NEW.fence IS NOT NULL
BEGIN
  DELETE FROM @table@ WHERE @is_new@ AND NEW.fence < 0;
  UPDATE @table@ SET fence_token = NEW.fence, fence = NULL WHERE @is_new@ AND NEW.fence > 0;
END;

-- INSERT OR REPLACE removes a row without asking the trigger for deletes.
DROP TRIGGER IF EXISTS @on_insert@;
CREATE TRIGGER @on_insert@ BEFORE INSERT ON @table@
BEGIN
  SELECT RAISE(ABORT, 'missing fencing token') WHERE NEW.fence IS NULL;
  SELECT RAISE(ABORT, 'not a fencing token')
    WHERE typeof(NEW.fence) <> 'integer' OR NEW.fence < 1;
  SELECT RAISE(ABORT, 'stale fencing token') FROM @table@ AS r
    WHERE @is_new_r@ AND NEW.fence @older@ r.fence_token;
END;

-- The key may be chosen by the database, and is known only now.
DROP TRIGGER IF EXISTS @after_insert@;
CREATE TRIGGER @after_insert@ AFTER INSERT ON @table@
BEGIN
  SELECT RAISE(ABORT, 'a fenced row needs a key') WHERE @new_key_missing@;
  SELECT RAISE(ABORT, 'stale fencing token') FROM @marks@ AS m
    WHERE @new_is_m@ AND NEW.fence @older@ m.fence_token;
  UPDATE @table@ SET fence_token = NEW.fence, fence = NULL WHERE @is_new@;
END;

-- Only the trigger after an update deletes, when a row presents its token below zero.
DROP TRIGGER IF EXISTS @on_delete@;
CREATE TRIGGER @on_delete@ BEFORE DELETE ON @table@
BEGIN
  SELECT RAISE(ABORT, 'missing fencing token: delete by UPDATE, SET fence = -TOKEN')
    WHERE OLD.fence IS NULL;
  SELECT RAISE(ABORT, 'stale fencing token') FROM @marks@ AS m
    WHERE @old_is_m@ AND -OLD.fence < m.fence_token;
  DELETE FROM @marks@ WHERE @old_is@;
  INSERT INTO @marks@ (@columns@, fence_token) VALUES (@old_columns@, -OLD.fence);
END;

-- Takes: the mark and the row, if it is there. A strict table keeps the token itself for the write.
DROP VIEW IF EXISTS @take@;
CREATE VIEW @take@ AS SELECT @table_columns@, fence FROM @table@;
CREATE TRIGGER @on_take@ INSTEAD OF INSERT ON @take@
BEGIN
  SELECT RAISE(ABORT, 'missing fencing token') WHERE NEW.fence IS NULL;
  SELECT RAISE(ABORT, 'not a fencing token')
    WHERE typeof(NEW.fence) <> 'integer' OR NEW.fence < 1;
  SELECT RAISE(ABORT, 'a fenced row needs a key') WHERE @new_key_missing@;
  SELECT RAISE(ABORT, 'stale fencing token') FROM @marks@ AS m
    WHERE @new_is_m@ AND NEW.fence @older@ m.fence_token;
  SELECT RAISE(ABORT, 'stale fencing token') FROM @table@ AS r
    WHERE @is_new_r@ AND NEW.fence @older@ r.fence_token;
  DELETE FROM @marks@ WHERE @new_is@;
  INSERT INTO @marks@ (@columns@, fence_token) VALUES (@new_columns@, NEW.fence - @spare@);
  UPDATE @table@ SET fence = NEW.fence - @spare@
    WHERE @is_new@ AND NEW.fence - @spare@ > coalesce(fence_token, 0);
END;
