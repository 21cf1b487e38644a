//! Tests of the embedded engine's verbs.
