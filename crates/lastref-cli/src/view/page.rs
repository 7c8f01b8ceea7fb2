//! One page with its data inside: tiles of every level as far as they fit, and every allocation.

use std::io::Write;

use anyhow::{Context, Result};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use flate2::Compression;
use flate2::write::GzEncoder;
use lastref_snapshot::timeline::{Span, Timeline};
use serde::Serialize;

use super::answers::{self, About, File, Stack};

/// The page as it is built from `web/`.
pub(super) const PAGE: &str = include_str!("../../viewer/index.html");

/// What stands in the page where its data goes.
const PLACE: &str = "<!--lastref:data-->";

/// Tiles of one device take no more than this, before they are packed. Finer levels than fit are
/// left out; the page then shows the finest that is there.
const MOST_TILE_BYTES: usize = 48 << 20;

#[derive(Serialize)]
struct Header {
    about: About,
    files: Vec<FileHeader>,
}

#[derive(Serialize)]
struct FileHeader {
    stacks: Vec<Stack>,
    devices: Vec<DeviceHeader>,
}

#[derive(Serialize)]
struct DeviceHeader {
    tiles: Vec<(u32, usize, usize, usize)>,
    allocations: Column,
    segments: Column,
}

#[derive(Serialize)]
struct Column {
    at: usize,
    count: usize,
}

/// The page with these files in it.
pub(super) fn with_data(files: &[File]) -> Result<String> {
    let (before, after) = PAGE
        .split_once(PLACE)
        .context("the page has no place for data: build web/ again")?;
    let mut data = Vec::new();
    let headers: Vec<FileHeader> = files
        .iter()
        .map(|file| {
            let devices = file.timelines.iter().map(|timeline| DeviceHeader {
                tiles: put_tiles(timeline, &mut data),
                allocations: put_spans(timeline.allocations(), &mut data),
                segments: put_spans(timeline.segments(), &mut data),
            });
            let devices = devices.collect();
            FileHeader {
                stacks: file.stacks().map(|stack| file.stack(stack)).collect(),
                devices,
            }
        })
        .collect();
    let about = answers::about(files, |file, device| {
        let finest = headers[file].devices[device].tiles.last();
        finest.map_or(0, |(level, ..)| *level)
    });
    let mut header = serde_json::to_vec(&Header {
        about,
        files: headers,
    })?;
    // The data begins at a multiple of eight, where JSON may end in spaces.
    header.resize((4 + header.len()).next_multiple_of(8) - 4, b' ');
    let length =
        u32::try_from(header.len()).context("the stacks of these files do not fit into a page")?;
    let mut packed = GzEncoder::new(Vec::new(), Compression::default());
    packed.write_all(&length.to_le_bytes())?;
    packed.write_all(&header)?;
    packed.write_all(&data)?;
    let packed = packed.finish()?;
    Ok(format!(
        "{before}<script type=\"application/gzip+base64\" id=\"lastref-data\">{}</script>{after}",
        STANDARD.encode(packed)
    ))
}

/// Puts tiles behind `data`, the coarsest level first and the finest that fits last, and says where.
fn put_tiles(timeline: &Timeline, data: &mut Vec<u8>) -> Vec<(u32, usize, usize, usize)> {
    let start = data.len();
    let mut places = Vec::new();
    for level in (0..timeline.levels()).rev() {
        let (places_before, data_before) = (places.len(), data.len());
        for index in 0..timeline.tiles(level) {
            let Some(tile) = timeline.tile(level, index) else {
                continue;
            };
            let bytes = tile.to_bytes(timeline);
            places.push((level, index, data.len(), bytes.len()));
            data.extend(bytes);
            data.resize(data.len().next_multiple_of(8), 0);
            if data.len() - start > MOST_TILE_BYTES && level + 1 < timeline.levels() {
                // A level is there whole or not at all.
                places.truncate(places_before);
                data.truncate(data_before);
                return places;
            }
        }
    }
    places
}

fn put_spans(spans: &[Span], data: &mut Vec<u8>) -> Column {
    let at = data.len();
    #[expect(
        clippy::cast_precision_loss,
        reason = "addresses of devices are below 2^53"
    )]
    let double = |value: u64| (value as f64).to_le_bytes();
    data.extend(spans.iter().flat_map(|span| double(span.address)));
    data.extend(spans.iter().flat_map(|span| double(span.bytes)));
    data.extend(spans.iter().flat_map(|span| span.start.to_le_bytes()));
    data.extend(spans.iter().flat_map(|span| span.given.to_le_bytes()));
    data.extend(spans.iter().flat_map(|span| span.end.to_le_bytes()));
    let stack = |span: &Span| u32::try_from(span.stack.index()).unwrap_or(0);
    data.extend(spans.iter().flat_map(|span| stack(span).to_le_bytes()));
    let growable = |span: &Span| u32::from(span.growable);
    data.extend(spans.iter().flat_map(|span| growable(span).to_le_bytes()));
    data.resize(data.len().next_multiple_of(8), 0);
    Column {
        at,
        count: spans.len(),
    }
}
