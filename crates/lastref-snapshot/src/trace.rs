//! Allocation traces (in the making).
