//! The page over HTTP, on this machine alone.
//!
//! It listens on 127.0.0.1, and answers nothing without the token that is in the address it
//! prints: other users of the machine, and pages of other sites in the same browser, do not know
//! it.

use std::io::Write;
use std::net::Ipv4Addr;
use std::sync::Arc;

use anyhow::Context;
use axum::Router;
use axum::extract::{Path, Query, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{Html, IntoResponse, Json, Response};
use axum::routing::get;
use lastref_snapshot::timeline::Timeline;
use serde::Deserialize;
use tokio::net::TcpListener;

use super::answers::{self, File};
use super::page;
use crate::Failure;

struct Shared {
    files: Vec<File>,
    token: String,
}

type App = State<Arc<Shared>>;

/// Serves until the process is stopped.
pub(super) fn serve(
    files: Vec<File>,
    port: u16,
    open: bool,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let token = random_token().map_err(Failure::BadInput)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_io()
        .build()
        .context("cannot start serving")
        .map_err(Failure::BadInput)?;
    runtime.block_on(async {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))
            .await
            .with_context(|| format!("cannot listen on 127.0.0.1:{port}"))
            .map_err(Failure::BadInput)?;
        let address = listener.local_addr()?;
        let url = format!("http://{address}/?token={token}");
        writeln!(out, "{url}")?;
        out.flush()?;
        if open && let Err(error) = open::that_detached(&url) {
            writeln!(
                anstream::stderr(),
                "cannot open a browser ({error}): open the address above"
            )?;
        }
        axum::serve(listener, router(files, token)).await?;
        Ok(())
    })
}

/// 128 bits that nobody can guess.
fn random_token() -> anyhow::Result<String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).context("the system gives no random bytes")?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn router(files: Vec<File>, token: String) -> Router {
    let shared = Arc::new(Shared { files, token });
    Router::new()
        .route("/", get(async || Html(page::PAGE)))
        .route("/api/about", get(about))
        .route("/api/{file}/search", get(search))
        .route("/api/{file}/stack/{stack}", get(stack))
        .route("/api/{file}/{device}/tile/{level}/{index}", get(tile))
        .route("/api/{file}/{device}/state/{entry}", get(state))
        .route("/api/{file}/{device}/stacks/{entry}", get(stacks))
        .route("/api/{file}/{device}/allocation/{id}", get(allocation))
        .layer(middleware::from_fn_with_state(Arc::clone(&shared), guard))
        .with_state(shared)
}

/// Lets pass what knows the token: the page's address has it as a parameter, its requests as a
/// header. The comparison takes the same time wherever the first difference is.
async fn guard(State(shared): App, request: Request, next: Next) -> Response {
    let given = request
        .headers()
        .get(header::AUTHORIZATION)
        .and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "))
        .or_else(|| request.uri().query()?.strip_prefix("token="))
        .unwrap_or("");
    let same = given.len() == shared.token.len()
        && given
            .bytes()
            .zip(shared.token.bytes())
            .fold(0, |difference, (a, b)| difference | (a ^ b))
            == 0;
    if !same {
        let text = "open the address that `lastref view` printed: it has the token\n";
        return (StatusCode::FORBIDDEN, text).into_response();
    }
    let mut response = next.run(request).await;
    let headers = response.headers_mut();
    // Nothing of a snapshot stays in a cache, and the page loads nothing from elsewhere.
    headers.insert(
        header::CACHE_CONTROL,
        header::HeaderValue::from_static("no-store"),
    );
    headers.insert(
        header::CONTENT_SECURITY_POLICY,
        header::HeaderValue::from_static(
            "default-src 'none'; connect-src 'self'; img-src data:; \
             script-src 'unsafe-inline'; style-src 'unsafe-inline'",
        ),
    );
    headers.insert(
        header::REFERRER_POLICY,
        header::HeaderValue::from_static("no-referrer"),
    );
    response
}

fn missing(what: &str) -> Response {
    (StatusCode::NOT_FOUND, format!("there is no such {what}\n")).into_response()
}

fn device(shared: &Shared, file: usize, device: usize) -> Option<(&File, &Timeline)> {
    let file = shared.files.get(file)?;
    Some((file, file.timelines.get(device)?))
}

async fn about(State(shared): App) -> Response {
    Json(answers::about(&shared.files, |_, _| 0)).into_response()
}

#[derive(Deserialize)]
struct Wanted {
    text: String,
}

async fn search(
    State(shared): App,
    Path(file): Path<usize>,
    Query(wanted): Query<Wanted>,
) -> Response {
    match shared.files.get(file) {
        Some(file) => Json(file.search(&wanted.text)).into_response(),
        None => missing("file"),
    }
}

async fn stack(State(shared): App, Path((file, stack)): Path<(usize, usize)>) -> Response {
    let found = shared.files.get(file).and_then(|file| {
        let stack = file.stacks().nth(stack)?;
        Some(file.stack(stack))
    });
    found.map_or_else(|| missing("stack"), |stack| Json(stack).into_response())
}

async fn tile(
    State(shared): App,
    Path((file, at, level, index)): Path<(usize, usize, u32, usize)>,
) -> Response {
    let found = device(&shared, file, at).and_then(|(_, timeline)| {
        let tile = timeline.tile(level, index)?;
        Some(tile.to_bytes(timeline))
    });
    match found {
        Some(bytes) => {
            ([(header::CONTENT_TYPE, "application/octet-stream")], bytes).into_response()
        }
        None => missing("tile"),
    }
}

async fn state(State(shared): App, Path((file, at, entry)): Path<(usize, usize, u32)>) -> Response {
    match device(&shared, file, at) {
        Some((_, timeline)) => Json(answers::state(timeline, entry)).into_response(),
        None => missing("device"),
    }
}

async fn stacks(
    State(shared): App,
    Path((file, at, entry)): Path<(usize, usize, u32)>,
) -> Response {
    match device(&shared, file, at) {
        Some((file, timeline)) => Json(answers::stacks(file, timeline, entry)).into_response(),
        None => missing("device"),
    }
}

async fn allocation(
    State(shared): App,
    Path((file, at, id)): Path<(usize, usize, u32)>,
) -> Response {
    let found =
        device(&shared, file, at).and_then(|(_, timeline)| answers::allocation(timeline, id));
    found.map_or_else(
        || missing("allocation"),
        |allocation| Json(allocation).into_response(),
    )
}
