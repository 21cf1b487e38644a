//! A [`WriteToken`] as a parameter of SQL: a `bigint`, or `INTEGER` in SQLite. A number that no engine
//! grants is an error of the statement, never another number.

#[cfg(feature = "tokio-postgres")]
mod postgres {
    use std::error::Error;

    use tokio_postgres::types::private::BytesMut;
    use tokio_postgres::types::{IsNull, ToSql, Type, to_sql_checked};

    use crate::fence::WriteToken;

    impl ToSql for WriteToken {
        fn to_sql(
            &self,
            as_type: &Type,
            out: &mut BytesMut,
        ) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
            let number = self.stored()?;
            // `set_config('palisade.fence', $1, true)` takes a text.
            if *as_type == Type::TEXT {
                return number.to_string().to_sql(as_type, out);
            }
            number.to_sql(as_type, out)
        }

        fn accepts(as_type: &Type) -> bool {
            *as_type == Type::TEXT || <i64 as ToSql>::accepts(as_type)
        }

        to_sql_checked!();
    }
}

#[cfg(feature = "sqlx")]
mod sqlx {
    use ::sqlx::encode::{Encode, IsNull};
    use ::sqlx::error::BoxDynError;
    use ::sqlx::postgres::{PgArgumentBuffer, PgTypeInfo};
    use ::sqlx::{Postgres, Type};

    use crate::fence::WriteToken;

    impl Type<Postgres> for WriteToken {
        fn type_info() -> PgTypeInfo {
            <i64 as Type<Postgres>>::type_info()
        }
    }

    impl Encode<'_, Postgres> for WriteToken {
        fn encode_by_ref(&self, buffer: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
            Encode::<Postgres>::encode_by_ref(&self.stored()?, buffer)
        }
    }
}

#[cfg(feature = "rusqlite")]
mod sqlite {
    use rusqlite::ToSql;
    use rusqlite::types::ToSqlOutput;

    use crate::fence::WriteToken;

    impl ToSql for WriteToken {
        fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
            let number = self.stored();
            let number = number.map_err(|e| rusqlite::Error::ToSqlConversionFailure(e.into()))?;
            Ok(number.into())
        }
    }
}
