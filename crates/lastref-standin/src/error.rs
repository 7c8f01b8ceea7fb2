//! Results as CUDA numbers them, the same in the driver and in the runtime, with their names and texts.

use lastref_alloc::DeviceError;

use crate::log;

/// A result other than success.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Code(pub(crate) i32);

/// What a call comes to.
pub(crate) type Outcome = Result<(), Code>;

macro_rules! codes {
    (
        $($constant:ident = $number:literal, $driver:literal, $runtime:literal, $text:literal;)+
        // Numbers that only failures on demand return.
        $(_ = $other:literal, $other_driver:literal, $other_runtime:literal, $other_text:literal;)+
    ) => {
        impl Code {
            $(pub(crate) const $constant: Self = Self($number);)+

            /// The names in the driver and in the runtime, and a text for both, each ending with a zero.
            fn words(self) -> Option<(&'static str, &'static str, &'static str)> {
                match self.0 {
                    0 => Some(("CUDA_SUCCESS\0", "cudaSuccess\0", "no error\0")),
                    $($number => Some((
                        concat!($driver, "\0"),
                        concat!($runtime, "\0"),
                        concat!($text, "\0"),
                    )),)+
                    $($other => Some((
                        concat!($other_driver, "\0"),
                        concat!($other_runtime, "\0"),
                        concat!($other_text, "\0"),
                    )),)+
                    _ => None,
                }
            }
        }
    };
}

codes! {
    INVALID_VALUE = 1, "CUDA_ERROR_INVALID_VALUE", "cudaErrorInvalidValue", "invalid argument";
    OUT_OF_MEMORY = 2, "CUDA_ERROR_OUT_OF_MEMORY", "cudaErrorMemoryAllocation", "out of memory";
    NOT_INITIALIZED = 3, "CUDA_ERROR_NOT_INITIALIZED", "cudaErrorInitializationError", "initialization error";
    INVALID_SYMBOL = 13, "CUDA_ERROR_UNKNOWN", "cudaErrorInvalidSymbol", "invalid device symbol";
    INSUFFICIENT_DRIVER = 35, "CUDA_ERROR_UNKNOWN", "cudaErrorInsufficientDriver",
        "CUDA driver version is insufficient for CUDA runtime version";
    MISSING_CONFIGURATION = 52, "CUDA_ERROR_UNKNOWN", "cudaErrorMissingConfiguration",
        "__global__ function call is not configured";
    NO_DEVICE = 100, "CUDA_ERROR_NO_DEVICE", "cudaErrorNoDevice", "no CUDA-capable device is detected";
    INVALID_DEVICE = 101, "CUDA_ERROR_INVALID_DEVICE", "cudaErrorInvalidDevice", "invalid device ordinal";
    INVALID_CONTEXT = 201, "CUDA_ERROR_INVALID_CONTEXT", "cudaErrorDeviceUninitialized", "invalid device context";
    INVALID_HANDLE = 400, "CUDA_ERROR_INVALID_HANDLE", "cudaErrorInvalidResourceHandle", "invalid resource handle";
    NOT_FOUND = 500, "CUDA_ERROR_NOT_FOUND", "cudaErrorSymbolNotFound", "named symbol not found";
    NOT_READY = 600, "CUDA_ERROR_NOT_READY", "cudaErrorNotReady", "device not ready";
    ILLEGAL_ADDRESS = 700, "CUDA_ERROR_ILLEGAL_ADDRESS", "cudaErrorIllegalAddress",
        "an illegal memory access was encountered";
    PEER_ACCESS_ALREADY_ENABLED = 704, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
        "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled";
    PEER_ACCESS_NOT_ENABLED = 705, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "cudaErrorPeerAccessNotEnabled",
        "peer access has not been enabled";
    CONTEXT_IS_DESTROYED = 709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "cudaErrorContextIsDestroyed",
        "context is destroyed";
    HOST_MEMORY_ALREADY_REGISTERED = 712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        "cudaErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped";
    HOST_MEMORY_NOT_REGISTERED = 713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
        "cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region";
    NOT_SUPPORTED = 801, "CUDA_ERROR_NOT_SUPPORTED", "cudaErrorNotSupported", "operation not supported";
    STREAM_CAPTURE_UNSUPPORTED = 900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing";
    STREAM_CAPTURE_INVALIDATED = 901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture";
    STREAM_CAPTURE_MERGE = 902, "CUDA_ERROR_STREAM_CAPTURE_MERGE", "cudaErrorStreamCaptureMerge",
        "operation would result in a merge of separate capture sequences";
    STREAM_CAPTURE_UNMATCHED = 903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "cudaErrorStreamCaptureUnmatched",
        "capture was not ended in the same stream as it began";
    STREAM_CAPTURE_UNJOINED = 904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "cudaErrorStreamCaptureUnjoined",
        "capturing stream has unjoined work";
    STREAM_CAPTURE_ISOLATION = 905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "cudaErrorStreamCaptureIsolation",
        "dependency created on uncaptured work in another stream";
    STREAM_CAPTURE_IMPLICIT = 906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "cudaErrorStreamCaptureImplicit",
        "operation would make the legacy stream depend on a capturing blocking stream";
    CAPTURED_EVENT = 907, "CUDA_ERROR_CAPTURED_EVENT", "cudaErrorCapturedEvent",
        "operation not permitted on an event last recorded in a capturing stream";
    STREAM_CAPTURE_WRONG_THREAD = 908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
        "cudaErrorStreamCaptureWrongThread", "attempt to terminate a thread-local capture sequence from another thread";
    UNKNOWN = 999, "CUDA_ERROR_UNKNOWN", "cudaErrorUnknown", "unknown error";
    _ = 4, "CUDA_ERROR_DEINITIALIZED", "cudaErrorCudartUnloading", "driver shutting down";
    _ = 46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "cudaErrorDevicesUnavailable",
        "CUDA-capable device(s) is/are busy or unavailable";
    _ = 200, "CUDA_ERROR_INVALID_IMAGE", "cudaErrorInvalidKernelImage", "device kernel image is invalid";
    _ = 214, "CUDA_ERROR_ECC_UNCORRECTABLE", "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered";
    _ = 304, "CUDA_ERROR_OPERATING_SYSTEM", "cudaErrorOperatingSystem", "OS call failed or operation not supported on this OS";
    _ = 702, "CUDA_ERROR_LAUNCH_TIMEOUT", "cudaErrorLaunchTimeout", "the launch timed out and was terminated";
    _ = 710, "CUDA_ERROR_ASSERT", "cudaErrorAssert", "device-side assert triggered";
    _ = 719, "CUDA_ERROR_LAUNCH_FAILED", "cudaErrorLaunchFailure", "unspecified launch failure";
    _ = 800, "CUDA_ERROR_NOT_PERMITTED", "cudaErrorNotPermitted", "operation not permitted";
    _ = 802, "CUDA_ERROR_SYSTEM_NOT_READY", "cudaErrorSystemNotReady", "system not yet initialized";
}

impl Code {
    pub(crate) fn driver_name(self) -> Option<&'static str> {
        self.words().map(|words| words.0)
    }

    pub(crate) fn runtime_name(self) -> Option<&'static str> {
        self.words().map(|words| words.1)
    }

    pub(crate) fn text(self) -> Option<&'static str> {
        self.words().map(|words| words.2)
    }
}

impl From<DeviceError> for Code {
    fn from(error: DeviceError) -> Self {
        match error {
            DeviceError::OutOfMemory { .. } => Self::OUT_OF_MEMORY,
            DeviceError::NotSupported { .. } => Self::NOT_SUPPORTED,
            DeviceError::InvalidArgument { .. } => {
                log::note(&error.to_string());
                Self::INVALID_VALUE
            }
            // The host has refused something.
            error => {
                log::note(&error.to_string());
                Self::UNKNOWN
            }
        }
    }
}
