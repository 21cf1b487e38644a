-- Fences the rows of @table@. Run it in one transaction; it can be run again. A write presents its
-- token in the column "fence", or for its whole transaction by
-- SELECT set_config('palisade.fence', TOKEN, true); a trigger compares it with the highest token of
-- the row, moves it to "fence_token" and clears "fence". A write without a token, or with a lower
-- one, fails: PFT02, PFT01. A write that depends on what it reads takes first, and reads then:
--   UPDATE @table@ SET fence = TOKEN WHERE KEY RETURNING *;      -- of a row that is there
--   INSERT INTO @marks@ (@columns@, fence) VALUES (KEY, TOKEN);  -- of any row

DO $fence$
BEGIN
  -- Whoever writes by earlier triggers is waited for.
  LOCK TABLE @table@ IN ACCESS EXCLUSIVE MODE;
  IF EXISTS (SELECT FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhparent
              WHERE c.oid = '@table@'::regclass AND c.relkind <> 'p') THEN
    RAISE EXCEPTION 'a table with children by INHERITS can''t be fenced' USING ERRCODE = 'PFT04',
      HINT = 'Triggers of a table don''t see the rows of its children. Make them partitions, or fence each child alone.';
  END IF;
END $fence$;

ALTER TABLE @table@
  ADD COLUMN IF NOT EXISTS fence bigint,        -- presented; NULL at rest
  ADD COLUMN IF NOT EXISTS fence_token bigint;  -- the highest that was accepted

-- @marks@ has the tokens of rows that were deleted, and of rows when they were made: a row that
-- comes back starts above them. Its key has the columns, types and collations of the table's, so
-- that keys are equal here when they are equal there. To forget a key that is never used again,
-- delete its mark.
DO $fence$
DECLARE
  v_key     text[] := ARRAY[@names@];
  v_kept    text[];
  v_is_old  boolean := false;  -- keyed by text, as by an earlier palisade
  v_column  text;
  v_type    text;
  v_collate text;
  v_from    text;
  v_same    text;
  v_list    text;
BEGIN
  IF to_regclass('@marks@') IS NULL THEN
    CREATE TABLE @marks@ (fence_token bigint NOT NULL, fence bigint);
  ELSIF NOT EXISTS (SELECT FROM pg_attribute WHERE attrelid = to_regclass('@marks@')
                       AND attname = 'fence_token' AND NOT attisdropped) THEN
    v_is_old := true;
    SELECT conname INTO STRICT v_column FROM pg_constraint
     WHERE conrelid = to_regclass('@marks@') AND contype = 'p';
    EXECUTE format('ALTER TABLE @marks@ DROP CONSTRAINT %I', v_column);
    ALTER TABLE @marks@ RENAME COLUMN token TO fence_token;
    ALTER TABLE @marks@ RENAME COLUMN resource TO fence_old;
    ALTER TABLE @marks@ ADD COLUMN fence bigint;
  END IF;
  SELECT array_agg(attname::text) INTO v_kept FROM pg_attribute
   WHERE attrelid = to_regclass('@marks@') AND attnum > 0 AND NOT attisdropped
     AND attname NOT IN ('fence', 'fence_token', 'fence_old');
  IF NOT (v_kept @> v_key AND v_kept <@ v_key) THEN
    RAISE EXCEPTION 'the marks are kept by other columns: %', array_to_string(v_kept, ', ')
      USING ERRCODE = 'PFT04',
      HINT = 'Name the same key, or drop @marks@ while nobody holds a lock of this table.';
  END IF;

  FOR i IN 1 .. cardinality(v_key) LOOP
    v_column := v_key[i];
    SELECT format_type(a.atttypid, a.atttypmod),
           coalesce(' COLLATE ' || quote_ident(n.nspname) || '.' || quote_ident(c.collname), '')
      INTO v_type, v_collate
      FROM pg_attribute a LEFT JOIN pg_collation c ON c.oid = a.attcollation
           LEFT JOIN pg_namespace n ON n.oid = c.collnamespace
     WHERE a.attrelid = '@table@'::regclass AND a.attname = v_column AND NOT a.attisdropped;
    IF v_type IS NULL THEN
      RAISE EXCEPTION 'the table has no column %', v_column USING ERRCODE = 'PFT04',
        HINT = 'Name the columns of its primary key: --key COLUMN,COLUMN.';
    END IF;
    v_same := concat_ws(' AND ', v_same, format('a.%1$I = b.%1$I', v_column));
    v_list := concat_ws(', ', v_list, format('%I', v_column));
    IF v_kept IS NOT NULL THEN
      -- As the table has it now.
      EXECUTE format('ALTER TABLE @marks@ ALTER COLUMN %1$I TYPE %2$s%3$s USING %1$I::%2$s',
                     v_column, v_type, v_collate);
      CONTINUE;
    END IF;
    EXECUTE format('ALTER TABLE @marks@ ADD COLUMN %I %s%s', v_column, v_type, v_collate);
    IF v_is_old THEN
      v_from := CASE WHEN cardinality(v_key) = 1 THEN 'fence_old'
                     ELSE format('(fence_old::jsonb ->> %s)', i - 1) END;
      BEGIN
        -- A date is written in the style of the session that wrote it: only ISO can be read back.
        IF v_from = 'fence_old' AND v_type ~ '^(date|timestamp|tstz|tsrange)' AND EXISTS (
             SELECT FROM @marks@ AS m WHERE m.fence_old !~ '^[[(]?"?(\d{4,}-|-?infinity)'
           ) THEN
          RAISE EXCEPTION 'a date that is not in ISO style';
        ELSIF v_from = 'fence_old' AND v_type IN ('real', 'double precision') AND EXISTS (
             SELECT FROM @marks@ AS m WHERE m.fence_old !~ '^-?\d{1,6}$'
           ) THEN
          RAISE EXCEPTION 'a number that may have been rounded';
        END IF;
        EXECUTE format('UPDATE @marks@ SET %I = %s::%s', v_column, v_from, v_type);
      EXCEPTION WHEN OTHERS THEN
        RAISE EXCEPTION 'the marks can''t be carried over to the type of %: %', v_column, SQLERRM
          USING ERRCODE = 'PFT04',
          HINT = 'Correct or delete the rows of @marks@ that are no such value; nothing was changed.';
      END;
    END IF;
  END LOOP;

  IF v_is_old THEN
    -- Several texts may have been the same key.
    EXECUTE format('DELETE FROM @marks@ a USING @marks@ b
                     WHERE %s AND (a.fence_token, a.ctid) < (b.fence_token, b.ctid)', v_same);
    EXECUTE format('DELETE FROM @marks@ WHERE NOT ((%s) IS NOT NULL)', 'ROW(' || v_list || ')');
    ALTER TABLE @marks@ DROP COLUMN fence_old;
  END IF;
  IF v_kept IS NULL THEN
    EXECUTE format('ALTER TABLE @marks@ ADD PRIMARY KEY (%s)', v_list);
  END IF;
END $fence$;

CREATE OR REPLACE FUNCTION @refuse@(resource text, presented bigint, highest bigint)
RETURNS void LANGUAGE plpgsql AS $fence$
BEGIN
  IF presented IS NULL THEN
    RAISE EXCEPTION 'missing fencing token' USING ERRCODE = 'PFT02',
      HINT = 'Set the column fence, or call set_config(''palisade.fence'', TOKEN, true) in the transaction.';
  ELSIF presented < 1 THEN
    RAISE EXCEPTION 'not a fencing token' USING ERRCODE = 'PFT02';
  END IF;
  RAISE EXCEPTION 'stale fencing token' USING ERRCODE = 'PFT01',
    DETAIL = format('The highest token accepted is %s.', highest),
    HINT = 'Another holder has written since; take the lock again.';
END $fence$;

CREATE OR REPLACE FUNCTION @on_update@() RETURNS trigger LANGUAGE plpgsql AS $fence$
BEGIN
  IF NEW.fence IS NULL THEN
    NEW.fence := nullif(current_setting('palisade.fence', true), '')::bigint;
  END IF;
  IF NEW.fence IS NULL OR NEW.fence < 1 OR NEW.fence @older@ OLD.fence_token THEN
    PERFORM @refuse@(NULL, NEW.fence, OLD.fence_token);
  END IF;
  NEW.fence_token := NEW.fence;
  NEW.fence := NULL;
  RETURN NEW;
END $fence$;

-- After all others: a key may be generated, or be changed by another trigger.
CREATE OR REPLACE FUNCTION @on_key@() RETURNS trigger LANGUAGE plpgsql AS $fence$
BEGIN
  RAISE EXCEPTION 'the key of a fenced row can''t change' USING ERRCODE = 'PFT03',
    HINT = 'Delete the row and insert another.';
END $fence$;

CREATE OR REPLACE FUNCTION @on_insert@() RETURNS trigger LANGUAGE plpgsql AS $fence$
DECLARE
  v_highest bigint;
BEGIN
  IF NEW.fence IS NULL THEN
    NEW.fence := nullif(current_setting('palisade.fence', true), '')::bigint;
  END IF;
  IF NEW.fence IS NULL OR NEW.fence < 1 THEN
    PERFORM @refuse@(NULL, NEW.fence, NULL);
  END IF;
  -- A TRUNCATE of a partition fires only the partition's own trigger.
  IF TG_RELID <> '@table@'::regclass AND NOT EXISTS (
       SELECT FROM pg_trigger WHERE tgrelid = TG_RELID AND tgname = 'palisade_fence_truncate'
     ) THEN
    RAISE EXCEPTION 'this partition is newer than the fence of its table' USING ERRCODE = 'PFT04',
      HINT = 'Let the owner of the table run what `palisade schema postgres --fence` prints once more.';
  END IF;
  -- Only to refuse early: what decides is the mark when the row is there.
  SELECT m.fence_token INTO v_highest FROM @marks@ AS m WHERE @is_new@;
  IF NEW.fence @older@ v_highest THEN
    PERFORM @refuse@(NULL, NEW.fence, v_highest);
  END IF;
  NEW.fence_token := NEW.fence;
  NEW.fence := NULL;
  RETURN NEW;
END $fence$;

-- Writes the mark even of a row that is new: two who insert, take or delete one key take turns by
-- it.
CREATE OR REPLACE FUNCTION @after_insert@() RETURNS trigger LANGUAGE plpgsql AS $fence$
BEGIN
  IF @new_key_missing@ THEN
    RAISE EXCEPTION 'a fenced row needs a key' USING ERRCODE = 'PFT03';
  END IF;
  INSERT INTO @marks@ AS m (@columns@, fence_token) VALUES (@new_columns@, NEW.fence_token)
    ON CONFLICT (@columns@) DO UPDATE SET fence_token = excluded.fence_token
    WHERE NOT excluded.fence_token @older@ m.fence_token;
  IF NOT FOUND THEN
    PERFORM @refuse@(NULL, NEW.fence_token, (SELECT m.fence_token FROM @marks@ AS m WHERE @is_new@));
  END IF;
  RETURN NULL;
END $fence$;

CREATE OR REPLACE FUNCTION @on_delete@() RETURNS trigger LANGUAGE plpgsql AS $fence$
DECLARE
  v_fence bigint := nullif(current_setting('palisade.fence', true), '')::bigint;
BEGIN
  IF v_fence IS NULL OR v_fence < 1 OR v_fence @older@ OLD.fence_token THEN
    PERFORM @refuse@(NULL, v_fence, OLD.fence_token);
  END IF;
  INSERT INTO @marks@ AS m (@columns@, fence_token) VALUES (@old_columns@, v_fence)
    ON CONFLICT (@columns@) DO UPDATE SET fence_token = excluded.fence_token
    WHERE excluded.fence_token >= m.fence_token;
  IF NOT FOUND THEN
    PERFORM @refuse@(NULL, v_fence, (SELECT m.fence_token FROM @marks@ AS m WHERE @is_old@));
  END IF;
  RETURN OLD;
END $fence$;

-- Of the table, or of each of its partitions. Nobody else is at it meanwhile.
CREATE OR REPLACE FUNCTION @on_truncate@() RETURNS trigger LANGUAGE plpgsql AS $fence$
DECLARE
  v_fence   bigint := nullif(current_setting('palisade.fence', true), '')::bigint;
  v_highest bigint;
BEGIN
  EXECUTE format('SELECT max(greatest(r.fence_token, m.fence_token))
                    FROM %s AS r LEFT JOIN @marks@ AS m ON @is_r@', TG_RELID::regclass)
     INTO v_highest;
  IF v_fence IS NULL OR v_fence < 1 OR v_fence @older@ v_highest THEN
    PERFORM @refuse@(NULL, v_fence, v_highest);
  END IF;
  EXECUTE format('INSERT INTO @marks@ (@columns@, fence_token) SELECT @r_columns@, $1 FROM %s AS r
                      ON CONFLICT (@columns@) DO UPDATE SET fence_token = excluded.fence_token',
                 TG_RELID::regclass) USING v_fence;
  RETURN NULL;
END $fence$;

-- Takes: the mark first, so that no older INSERT is accepted any more, whether or not the row is
-- there; then the row. A strict table keeps the token itself for the write.
CREATE OR REPLACE FUNCTION @on_take@() RETURNS trigger LANGUAGE plpgsql AS $fence$
DECLARE
  v_mark    bigint := NEW.fence - @spare@;
  v_highest bigint;
BEGIN
  IF NEW.fence < 1 THEN
    PERFORM @refuse@(NULL, NEW.fence, NULL);
  END IF;
  INSERT INTO @marks@ AS m (@columns@, fence_token) VALUES (@new_columns@, v_mark)
    ON CONFLICT (@columns@) DO UPDATE SET fence_token = excluded.fence_token
    WHERE excluded.fence_token >= m.fence_token;
  IF NOT FOUND THEN
    PERFORM @refuse@(NULL, NEW.fence, greatest(
      (SELECT m.fence_token FROM @marks@ AS m WHERE @is_new@),
      (SELECT m.fence_token FROM @table@ AS m WHERE @is_new@)));
  END IF;
  SELECT m.fence_token INTO v_highest FROM @table@ AS m WHERE @is_new@ FOR UPDATE;
  IF NEW.fence @older@ v_highest THEN
    PERFORM @refuse@(NULL, NEW.fence, v_highest);
  ELSIF v_mark > coalesce(v_highest, 0) THEN
    UPDATE @table@ AS m SET fence = v_mark WHERE @is_new@;
  END IF;
  RETURN NULL;
END $fence$;

DROP TRIGGER IF EXISTS palisade_fence_update ON @table@;
CREATE TRIGGER palisade_fence_update BEFORE UPDATE ON @table@
  FOR EACH ROW EXECUTE FUNCTION @on_update@();
DROP TRIGGER IF EXISTS palisade_fence_key ON @table@;
CREATE TRIGGER palisade_fence_key AFTER UPDATE ON @table@
  FOR EACH ROW WHEN (@key_changed@) EXECUTE FUNCTION @on_key@();
DROP TRIGGER IF EXISTS palisade_fence_insert ON @table@;
CREATE TRIGGER palisade_fence_insert BEFORE INSERT ON @table@
  FOR EACH ROW EXECUTE FUNCTION @on_insert@();
DROP TRIGGER IF EXISTS palisade_fence_inserted ON @table@;
CREATE TRIGGER palisade_fence_inserted AFTER INSERT ON @table@
  FOR EACH ROW EXECUTE FUNCTION @after_insert@();
DROP TRIGGER IF EXISTS palisade_fence_delete ON @table@;
CREATE TRIGGER palisade_fence_delete BEFORE DELETE ON @table@
  FOR EACH ROW EXECUTE FUNCTION @on_delete@();
DROP TRIGGER IF EXISTS palisade_fence_take ON @marks@;
CREATE TRIGGER palisade_fence_take BEFORE INSERT ON @marks@
  FOR EACH ROW WHEN (NEW.fence IS NOT NULL) EXECUTE FUNCTION @on_take@();
DROP TRIGGER IF EXISTS palisade_fence_truncate ON @table@;
DO $fence$
DECLARE
  v_part regclass;
BEGIN
  FOR v_part IN
    SELECT oid FROM pg_class
     WHERE relkind = 'r' AND oid IN (SELECT '@table@'::regclass
                                     UNION SELECT relid FROM pg_partition_tree('@table@'))
  LOOP
    EXECUTE format('DROP TRIGGER IF EXISTS palisade_fence_truncate ON %s', v_part);
    EXECUTE format('CREATE TRIGGER palisade_fence_truncate BEFORE TRUNCATE ON %s
                      FOR EACH STATEMENT EXECUTE FUNCTION @on_truncate@()', v_part);
  END LOOP;
END $fence$;
