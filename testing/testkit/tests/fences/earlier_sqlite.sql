-- What an earlier version made of a table stock with the key id: its marks are keyed by text.
-- Fences the rows of "stock". A write presents its token in the column "fence"; triggers compare it
-- with the highest token of the row, move it to "fence_token" and clear "fence". A DELETE presents
-- it in "stock_fence" first, in the same transaction:
--   INSERT INTO "stock_fence" (resource, fence) VALUES (KEY, TOKEN)
--     ON CONFLICT (resource) DO UPDATE SET fence = excluded.fence;
-- A write without a token, or with a lower one, fails.

ALTER TABLE "stock" ADD COLUMN fence INTEGER;        -- presented; NULL at rest
ALTER TABLE "stock" ADD COLUMN fence_token INTEGER;  -- the highest that was accepted

-- The tokens of rows that were deleted: a row that comes back starts above them. To forget a key
-- that is never used again, delete its mark.
CREATE TABLE "stock_fence" (
  resource    TEXT PRIMARY KEY NOT NULL,
  fence       INTEGER,
  fence_token INTEGER
);

-- The condition leaves out the change by which the triggers below move a token: at rest there is
-- none to move.
CREATE TRIGGER "stock_fence_update" BEFORE UPDATE ON "stock"
WHEN NOT (OLD.fence IS NOT NULL AND NEW.fence IS NULL AND NEW.fence_token IS OLD.fence)
BEGIN
  SELECT RAISE(ABORT, 'missing fencing token') WHERE NEW.fence IS NULL;
  SELECT RAISE(ABORT, 'not a fencing token')
    WHERE typeof(NEW.fence) <> 'integer' OR NEW.fence < 1;
  SELECT RAISE(ABORT, 'stale fencing token') WHERE NEW.fence < OLD.fence_token;
  SELECT RAISE(ABORT, 'the key of a fenced row can''t change: delete it and insert another')
    WHERE NEW."id" IS NOT OLD."id";
END;

CREATE TRIGGER "stock_fence_updated" AFTER UPDATE ON "stock" WHEN NEW.fence IS NOT NULL
BEGIN
  UPDATE "stock" SET fence_token = NEW.fence, fence = NULL WHERE "id" = NEW."id";
END;

-- INSERT OR REPLACE removes a row without asking the trigger for deletes.
CREATE TRIGGER "stock_fence_insert" BEFORE INSERT ON "stock"
BEGIN
  SELECT RAISE(ABORT, 'missing fencing token') WHERE NEW.fence IS NULL;
  SELECT RAISE(ABORT, 'not a fencing token')
    WHERE typeof(NEW.fence) <> 'integer' OR NEW.fence < 1;
  SELECT RAISE(ABORT, 'stale fencing token') FROM "stock" AS r
    WHERE r."id" = NEW."id" AND NEW.fence < r.fence_token;
END;

-- The key may be chosen by the database, and is known only now.
CREATE TRIGGER "stock_fence_inserted" AFTER INSERT ON "stock"
BEGIN
  SELECT RAISE(ABORT, 'a fenced row needs a key') WHERE NEW."id" IS NULL;
  SELECT RAISE(ABORT, 'stale fencing token') FROM "stock_fence"
    WHERE resource = CAST(NEW."id" AS TEXT) AND NEW.fence < fence_token;
  UPDATE "stock" SET fence_token = NEW.fence, fence = NULL WHERE "id" = NEW."id";
END;

CREATE TRIGGER "stock_fence_delete" BEFORE DELETE ON "stock"
BEGIN
  SELECT RAISE(ABORT, 'missing fencing token') WHERE NOT EXISTS
    (SELECT 1 FROM "stock_fence" WHERE resource = CAST(OLD."id" AS TEXT) AND fence IS NOT NULL);
  SELECT RAISE(ABORT, 'not a fencing token') FROM "stock_fence"
    WHERE resource = CAST(OLD."id" AS TEXT) AND (typeof(fence) <> 'integer' OR fence < 1);
  SELECT RAISE(ABORT, 'stale fencing token') FROM "stock_fence"
    WHERE resource = CAST(OLD."id" AS TEXT) AND (fence < OLD.fence_token OR fence < fence_token);
  UPDATE "stock_fence" SET fence_token = fence, fence = NULL WHERE resource = CAST(OLD."id" AS TEXT);
END;
