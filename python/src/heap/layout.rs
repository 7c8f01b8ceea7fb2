//! What CPython tells of its objects only through its own layout: the variables of a frame without a dict
//! of locals, the attributes of an instance without a dict, what `gc.freeze` has hidden.
//!
//! 1. Addresses given to these functions are those of live objects, and the interpreter lock is held.
//! 2. The layouts in [`LAYOUTS`] are those of CPython's own headers, which do not change within a minor
//!    version. They are used only if the sizes that Python reports for its types agree; otherwise the same
//!    is asked through attributes, or is not known.

use std::ffi::CStr;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyList, PyType};

/// Instances keep their attributes in an array, or a dict, that lies beside the object.
const MANAGED_DICT: u64 = 1 << 4;
/// From 3.13 on: that array lies within the object.
const INLINE_VALUES: u64 = 1 << 2;

const NAMES_OF_CAPSULES: [&CStr; 2] = [c"dltensor", c"dltensor_versioned"];

/// Where CPython keeps what no function of its stable interface tells without making new objects.
/// Offsets in bytes, from the headers `pycore_frame.h`, `pycore_dict.h`, `pycore_gc.h` of the version.
#[derive(Clone, Copy)]
struct Layout {
    minor: u8,
    type_size: usize,
    frame_size: usize,
    cached_keys: usize,
    frame_code: usize,
    frame_object: usize,
    frame_function: usize,
    frame_locals: usize,
    generator_frame: usize,
}

const LAYOUTS: [Layout; 3] = [
    Layout {
        minor: 11,
        type_size: 904,
        frame_size: 120,
        cached_keys: 872,
        frame_code: 32,
        frame_object: 40,
        frame_function: 0,
        frame_locals: 24,
        generator_frame: 80,
    },
    Layout {
        minor: 12,
        type_size: 920,
        frame_size: 120,
        cached_keys: 880,
        frame_code: 0,
        frame_object: 48,
        frame_function: 16,
        frame_locals: 40,
        generator_frame: 72,
    },
    Layout {
        minor: 13,
        type_size: 928,
        frame_size: 136,
        cached_keys: 880,
        frame_code: 0,
        frame_object: 48,
        frame_function: 16,
        frame_locals: 40,
        generator_frame: 72,
    },
];

/// The same in all three: the frame's `f_frame`; its variables; how many values lie above them.
const FRAME_DATA: usize = 24;
const FRAME_STACK_TOP: usize = 64;
const FRAME_VARIABLES: usize = 72;
/// The same in all three, in a dict's keys.
const KEYS_LOG2_INDEX_BYTES: usize = 9;
const KEYS_KIND: usize = 10;
const KEYS_COUNT: usize = 24;
const KEYS_INDICES: usize = 32;
const KEYS_KIND_GENERAL: u8 = 0;
/// From the head of the youngest generation's list to a pointer to it, and to the list of what is frozen.
const GENERATIONS_TO_YOUNGEST: usize = 72;
const GENERATIONS_TO_FROZEN: usize = 80;
const GENERATION_SIZE: usize = 24;
/// The collector's two words lie before the object.
const GC_HEAD_SIZE: usize = 16;

static LAYOUT: PyOnceLock<Option<Layout>> = PyOnceLock::new();

impl Layout {
    fn get(py: Python<'_>) -> Option<Self> {
        *LAYOUT.get_or_init(py, || Self::find(py).ok().flatten())
    }

    fn find(py: Python<'_>) -> PyResult<Option<Self>> {
        let version = py.version_info();
        let is_usual = version.major == 3 && cfg!(target_pointer_width = "64");
        let sys = py.import("sys")?;
        let is_cpython: bool = sys
            .getattr("implementation")?
            .getattr("name")?
            .eq("cpython")?;
        // Builds for debugging put more into every object; those without the lock are another world.
        let is_debug = sys.hasattr("gettotalrefcount")? || sys.getattr("abiflags")?.eq("t")?;
        if !is_usual || !is_cpython || is_debug {
            return Ok(None);
        }
        let size = |of: Bound<'_, PyAny>| of.getattr("__basicsize__")?.extract::<usize>();
        let type_size = size(py.get_type::<PyType>().into_any())?;
        let frame_size = size(py.import("types")?.getattr("FrameType")?)?;
        Ok(LAYOUTS.into_iter().find(|layout| {
            layout.minor == version.minor
                && layout.type_size == type_size
                && layout.frame_size == frame_size
        }))
    }
}

/// The value at an address.
///
/// # Safety
///
/// A `T` that may be copied lies there, as CPython laid it out.
unsafe fn read<T: Copy>(address: usize) -> T {
    let place = std::ptr::with_exposed_provenance::<T>(address);
    // SAFETY: as the caller promises; CPython aligns what it allocates to 8 bytes or more.
    unsafe { place.read_unaligned() }
}

pub(super) fn pointer(address: usize) -> *mut ffi::PyObject {
    std::ptr::with_exposed_provenance_mut(address)
}

/// A new reference on the object at an address.
pub(super) fn object(py: Python<'_>, address: usize) -> Bound<'_, PyAny> {
    // SAFETY: addresses of nodes are those of live objects (invariant 1), and so are those that live objects refer to.
    unsafe { Bound::from_borrowed_ptr(py, pointer(address)) }
}

pub(super) fn type_of(address: usize) -> *mut ffi::PyTypeObject {
    // SAFETY: a live object (invariant 1).
    unsafe { ffi::Py_TYPE(pointer(address)) }
}

pub(super) fn flags_of(class: *mut ffi::PyTypeObject) -> u64 {
    // SAFETY: the type of a live object lives.
    unsafe { ffi::PyType_GetFlags(class) }
}

pub(super) fn ref_count(address: usize) -> isize {
    // SAFETY: a live object (invariant 1).
    unsafe { ffi::Py_REFCNT(pointer(address)) }
}

pub(super) fn is_subtype(class: *mut ffi::PyTypeObject, of: &Bound<'_, PyType>) -> bool {
    // SAFETY: both types live.
    unsafe { ffi::PyType_IsSubtype(class, of.as_type_ptr()) != 0 }
}

pub(super) fn is_tracked(address: usize) -> bool {
    // SAFETY: a live object (invariant 1) of a type with HAVE_GC, as the callers see to.
    unsafe { ffi::PyObject_GC_IsTracked(pointer(address)) != 0 }
}

// ---- frames and attributes -------------------------------------------------------------------------

/// What a frame refers to: the name of the variable, and the value's address. A variable that closures
/// share is given as its cell. Values of an expression in progress, the function, and a dict of locals
/// have no name.
pub(super) type Variables = Vec<(Option<String>, usize)>;

pub(super) fn frame_variables(frame: &Bound<'_, PyAny>) -> PyResult<Variables> {
    let Some(layout) = Layout::get(frame.py()) else {
        return variables_by_attribute(frame);
    };
    let code = frame.getattr("f_code")?;
    let address = frame.as_ptr().expose_provenance();
    // SAFETY: an object of the type whose size was checked (invariant 2).
    let data = unsafe { read::<usize>(address + FRAME_DATA) };
    Ok(match variables_at(layout, data, address, &code)? {
        Some(variables) => variables,
        None => variables_by_attribute(frame)?,
    })
}

/// The same of a generator or coroutine; nothing if it is over, or the layout is not known.
fn generator_variables(generator: &Bound<'_, PyAny>) -> PyResult<Variables> {
    let py = generator.py();
    let Some(layout) = Layout::get(py) else {
        return Ok(Vec::new());
    };
    let types = py.import("types")?;
    let class = generator.get_type();
    for (name, prefix) in [
        ("GeneratorType", "gi"),
        ("CoroutineType", "cr"),
        ("AsyncGeneratorType", "ag"),
    ] {
        let kind = types.getattr(name)?;
        if !kind.is(&class) {
            continue;
        }
        let get = |name| generator.getattr(format!("{prefix}_{name}").as_str());
        // Of one that is over, the frame's values are not valid. (3.11 does not tell of asynchronous ones.)
        let is_alive = |name| get(name).is_ok_and(|value| value.is_truthy().unwrap_or(false));
        if !is_alive("suspended") && !is_alive("running") {
            return Ok(Vec::new());
        }
        let size: usize = kind.getattr("__basicsize__")?.extract()?;
        let data = generator.as_ptr().expose_provenance() + layout.generator_frame;
        let code = get("code")?;
        // The frame's data come last in such an object: its size ends where the values begin.
        if size == layout.generator_frame + FRAME_VARIABLES {
            return Ok(variables_at(layout, data, 0, &code)?.unwrap_or_default());
        }
    }
    Ok(Vec::new())
}

/// Reads the data of a frame at an address; `None` if they are not those of this frame and code.
fn variables_at(
    layout: Layout,
    data: usize,
    frame: usize,
    code: &Bound<'_, PyAny>,
) -> PyResult<Option<Variables>> {
    if data == 0 {
        return Ok(Some(Vec::new()));
    }
    // SAFETY: the data of a frame or generator, in this layout (invariant 2).
    let owner = unsafe { read::<usize>(data + layout.frame_object) };
    // SAFETY: as above.
    let owner_code = unsafe { read::<usize>(data + layout.frame_code) };
    if owner_code != code.as_ptr().expose_provenance()
        || (frame != 0 && owner != 0 && owner != frame)
    {
        return Ok(None);
    }
    let names = variable_names(code)?;
    // SAFETY: as above.
    let top = unsafe { read::<i32>(data + FRAME_STACK_TOP) };
    // Below zero: the function calls into C just now, and its expression's values are not counted.
    let count = usize::try_from(top).unwrap_or(names.len());
    let mut variables = Vec::new();
    for offset in [layout.frame_function, layout.frame_locals] {
        // SAFETY: as above.
        let value = unsafe { read::<usize>(data + offset) };
        if value != 0 && count >= names.len() {
            variables.push((None, value));
        }
    }
    for at in 0..count {
        // SAFETY: that many values lie there, each null or a reference that the frame holds.
        let value = unsafe { read::<usize>(data + FRAME_VARIABLES + at * size_of::<usize>()) };
        if value != 0 {
            variables.push((names.get(at).cloned(), value));
        }
    }
    Ok(Some(variables))
}

/// The names in the order in which a frame keeps the values.
fn variable_names(code: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
    let mut names: Vec<String> = code.getattr("co_varnames")?.extract()?;
    let cells: Vec<String> = code.getattr("co_cellvars")?.extract()?;
    let own: Vec<String> = cells
        .into_iter()
        .filter(|cell| !names.contains(cell))
        .collect();
    names.extend(own);
    names.extend(code.getattr("co_freevars")?.extract::<Vec<String>>()?);
    Ok(names)
}

/// Where the layout is not known. Before 3.13 this leaves a dict with the frame: it is emptied.
fn variables_by_attribute(frame: &Bound<'_, PyAny>) -> PyResult<Variables> {
    let py = frame.py();
    let is_old = py.version_info() < (3, 13);
    let locals = frame.getattr("f_locals")?;
    if locals.is(&frame.getattr("f_globals")?) {
        return Ok(Vec::new());
    }
    let mut variables = Vec::new();
    for item in locals.call_method0("items")?.try_iter()? {
        let (name, value) = item?.extract::<(String, Bound<'_, PyAny>)>()?;
        variables.push((Some(name), value.as_ptr().expose_provenance()));
    }
    if is_old && ref_count(locals.as_ptr().expose_provenance()) <= 2 {
        locals.call_method0("clear")?;
    }
    Ok(variables)
}

/// The attributes of an instance that has no dict yet: names, and addresses of values. `None` if it
/// keeps them in a dict, or the layout is not known.
fn instance_values(
    py: Python<'_>,
    instance: &Bound<'_, PyAny>,
) -> PyResult<Option<Vec<(String, usize)>>> {
    let class = instance.get_type();
    let flags = flags_of(class.as_type_ptr());
    let Some(layout) = Layout::get(py) else {
        return Ok(None);
    };
    if flags & MANAGED_DICT == 0 {
        return Ok(None);
    }
    let address = instance.as_ptr().expose_provenance();
    let values = match layout.minor {
        // SAFETY: with that flag, a pointer to the values lies four words before the object.
        11 => unsafe { read::<usize>(address - 32) },
        // SAFETY: with that flag, such a pointer, less one, or a dict lies three words before it.
        12 => match unsafe { read::<usize>(address - 24) } {
            odd if odd & 1 == 1 => odd + 1,
            _ => 0,
        },
        // SAFETY: with the second flag the values follow the object's two words; the fourth byte says whether they are in use.
        13 if flags & INLINE_VALUES != 0 && unsafe { read::<u8>(address + 19) } == 1 => {
            address + 24
        }
        _ => 0,
    };
    // SAFETY: instances with that flag are of types made by `class`, which have this field.
    let keys = unsafe { read::<usize>(class.as_ptr().expose_provenance() + layout.cached_keys) };
    if values == 0 || keys == 0 {
        return Ok(None);
    }
    // SAFETY: the keys that all instances of the class share.
    let log2 = unsafe { read::<u8>(keys + KEYS_LOG2_INDEX_BYTES) };
    // SAFETY: as above.
    let kind = unsafe { read::<u8>(keys + KEYS_KIND) };
    // SAFETY: as above.
    let count = unsafe { read::<usize>(keys + KEYS_COUNT) };
    if kind == KEYS_KIND_GENERAL || count > 64 {
        return Ok(None);
    }
    let entries = keys + KEYS_INDICES + (1 << log2);
    let mut found = Vec::new();
    for at in 0..count {
        // SAFETY: each key has a place among the values, which is null or a reference.
        let value = unsafe { read::<usize>(values + at * 8) };
        // SAFETY: entries of keys that are all strings are two words, the first the key.
        let key = unsafe { read::<usize>(entries + at * 16) };
        if value != 0 && key != 0 {
            found.push((object(py, key).extract::<String>()?, value));
        }
    }
    Ok(Some(found))
}

/// Where the interpreter keeps the heads of the collector's lists, the youngest first.
fn generations(gc: &Bound<'_, PyModule>) -> PyResult<Option<usize>> {
    for generation in [2, 1, 0] {
        let objects = gc.call_method1("get_objects", (generation,))?;
        let objects = objects.cast_into::<PyList>()?;
        // `get_objects` goes along the list: behind the last object comes the list's head, a part of the
        // interpreter's state. The youngest list ends in the object just made.
        let last = match objects.len().checked_sub(1) {
            _ if generation == 0 => objects.as_ptr().expose_provenance(),
            Some(last) => objects.get_item(last)?.as_ptr().expose_provenance(),
            None => continue,
        };
        // SAFETY: a tracked object has the collector's two words before it, the first of which leads on.
        let head = unsafe { read::<usize>(last - GC_HEAD_SIZE) };
        let first = head.wrapping_sub(generation * GENERATION_SIZE);
        // SAFETY: if that was the head, the state goes on for longer than this; and any object of the
        // allocator's has as much memory of its arena behind it.
        let youngest = unsafe { read::<usize>(first + GENERATIONS_TO_YOUNGEST) };
        if youngest == first {
            return Ok(Some(first));
        }
    }
    Ok(None)
}

/// What `gc.freeze` has hidden: the addresses. `None` if it cannot be found.
pub(super) fn frozen_objects(
    py: Python<'_>,
    gc: &Bound<'_, PyModule>,
) -> PyResult<Option<Vec<usize>>> {
    let count: usize = gc.call_method0("get_freeze_count")?.extract()?;
    if count == 0 {
        return Ok(Some(Vec::new()));
    }
    if Layout::get(py).is_none() {
        return Ok(None);
    }
    let Some(generations) = generations(gc)? else {
        return Ok(None);
    };
    let frozen = generations + GENERATIONS_TO_FROZEN;
    let mut found = Vec::with_capacity(count);
    // SAFETY: the head of the list of frozen objects, as the pointer before it confirms.
    let mut at = unsafe { read::<usize>(frozen) };
    while at != frozen && at != 0 && found.len() <= count {
        found.push(at + GC_HEAD_SIZE);
        // SAFETY: a member of that list, which is a ring.
        at = unsafe { read::<usize>(at) };
    }
    Ok((found.len() == count).then_some(found))
}

/// The address of the data of the tensor in a capsule that nobody has taken it from.
pub(super) fn capsule_data(capsule: &Bound<'_, PyAny>) -> Option<usize> {
    for name in NAMES_OF_CAPSULES {
        // SAFETY: any object and a name with a zero at the end; the answer is whether it is such a capsule.
        let is_valid = unsafe { ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) };
        if is_valid == 0 {
            continue;
        }
        // SAFETY: it is one.
        let managed = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), name.as_ptr()) };
        let managed = managed.expose_provenance();
        // With a version, four words come before the tensor: the version, the context, the deleter, the flags.
        let offset = if name == NAMES_OF_CAPSULES[0] { 0 } else { 32 };
        // SAFETY: a capsule of this name points to such a structure, in which the data's address comes first.
        let data = unsafe { read::<usize>(managed + offset) };
        // SAFETY: as above; the tensor's last field is how far behind that address its elements begin.
        let byte_offset = unsafe { read::<usize>(managed + offset + 40) };
        return Some(data + byte_offset);
    }
    None
}

/// What a frame, generator or coroutine holds, without leaving anything with it: pairs of a name and a value. A variable that closures share is given as its cell; the values of an expression in progress
/// have the name `None`.
#[pyfunction]
pub(crate) fn heap_frame_variables<'py>(
    frame: &Bound<'py, PyAny>,
) -> PyResult<Vec<(Option<String>, Bound<'py, PyAny>)>> {
    let is_frame = frame.get_type().name()? == "frame";
    let variables = if is_frame {
        frame_variables(frame)?
    } else {
        generator_variables(frame)?
    };
    Ok(variables
        .into_iter()
        .map(|(name, address)| (name, object(frame.py(), address)))
        .collect())
}

/// An attribute's name and value.
type Named<'py> = (String, Bound<'py, PyAny>);

/// The attributes of an instance without making the dict it may not have: pairs of a name and a value.
/// `None` if it has a dict, or none at all.
#[pyfunction]
pub(crate) fn heap_instance_values<'py>(
    instance: &Bound<'py, PyAny>,
) -> PyResult<Option<Vec<Named<'py>>>> {
    let py = instance.py();
    Ok(instance_values(py, instance)?.map(|values| {
        values
            .into_iter()
            .map(|(name, address)| (name, object(py, address)))
            .collect()
    }))
}
