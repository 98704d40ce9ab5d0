#Requires -Version 5.1
<#
.SYNOPSIS
Prepares this Windows PC to carry a node of Rackless in WSL.

.DESCRIPTION
Shows what it would change, asks, changes it, and keeps a record. Running it again changes only what
is missing. Some changes need an administrator: run it once in an ordinary PowerShell and once, with
the same Windows user, in one that was started as administrator.

  -DryRun     changes nothing; prints the plan as JSON
  -Undo       takes back all that this script has changed on this PC
  -Yes        does not ask; it still asks before it ends a run
  -AtLogon    keeps WSL running from your next login on, instead of from the start of Windows:
              for accounts without a password
  -Facts FILE with -DryRun: plans for the PC that this JSON file describes
#>
[CmdletBinding()]
param(
    [switch]$DryRun,
    [switch]$Undo,
    [switch]$Yes,
    [switch]$AtLogon,
    [string]$Facts = ''
)
$ErrorActionPreference = 'Stop'
# Exit codes of programs are looked at one by one; PowerShell 7 can throw for them.
$PSNativeCommandUseErrorActionPreference = $false
$Wanted = ConvertFrom-Json -InputObject '@@VALUES@@'
$ServerScript = '@@SERVER@@'
$WslVm = '{40E0AC32-46A5-438A-A0B2-2B479E8F2E90}'
$TaskName = 'Rackless-WSL'
$NoRule = 'no rule of Rackless'
$HiddenRules = 'cannot be read without an administrator'
$NoTask = 'no such task'
$AgentRuns = 'Automatic, Running'
if ($AtLogon) {
    $Wanted.start = 'logon'
}

# ------------------------------------------------------------------ .wslconfig
# Read as WSL reads it: the first line of a key counts, # begins a comment outside quotes, and a
# backslash at the end continues a value.

function Split-Value {
    param([string]$Rest)
    $quoted = $false
    $escaped = $false
    for ($i = 0; $i -lt $Rest.Length; $i++) {
        $char = $Rest.Substring($i, 1)
        if ($escaped) {
            $escaped = $false
        } elseif ($char -eq '\') {
            $escaped = $true
        } elseif ($char -eq '"') {
            $quoted = -not $quoted
        } elseif (($char -eq '#') -and (-not $quoted)) {
            return @{ End = $i; Continued = $false }
        }
    }
    return @{ End = $Rest.Length; Continued = $escaped }
}

function Get-LineEnd {
    param([string]$Line)
    return $Line.Substring($Line.TrimEnd("`r", "`n").Length)
}

function Set-Setting {
    param([string]$Text, $Setting)
    $lines = New-Object -TypeName System.Collections.ArrayList
    foreach ($found in [regex]::Matches($Text, '[^\r\n]*(\r\n|\n|\r)|[^\r\n]+')) {
        [void]$lines.Add($found.Value)
    }
    $section = ''
    $place = -1
    $index = 0
    while ($index -lt $lines.Count) {
        $header = [regex]::Match($lines[$index], '^[ \t]*\[([A-Za-z][A-Za-z0-9]*)\][ \t]*(#[^\r\n]*)?[\r\n]*$')
        $entry = [regex]::Match($lines[$index], '^([ \t]*([A-Za-z][A-Za-z0-9]*)[ \t]*=[ \t]*)([^\r\n]*)')
        if ($header.Success) {
            $section = $header.Groups[1].Value
            if ($section -eq $Setting.section) {
                $place = $index
            }
        } elseif ($entry.Success) {
            $rest = $entry.Groups[3].Value
            $parts = Split-Value -Rest $rest
            $last = $index
            $continued = $parts.Continued
            while ($continued -and (($last + 1) -lt $lines.Count)) {
                $last++
                $next = Split-Value -Rest ($lines[$last].TrimEnd("`r", "`n"))
                $continued = $next.Continued
            }
            $name = $section + '.' + $entry.Groups[2].Value
            if ($Setting.names -contains $name) {
                $comment = ''
                if ($last -eq $index) {
                    $bare = $rest.Substring(0, $parts.End)
                    $value = $bare.Trim(' ', "`t").Trim('"')
                    if ($value -eq $Setting.value) {
                        return $Text
                    }
                    $comment = $rest.Substring($bare.TrimEnd(' ', "`t").Length)
                }
                $end = Get-LineEnd -Line $lines[$last]
                $lines.RemoveRange($index, $last - $index + 1)
                $lines.Insert($index, $entry.Groups[1].Value + $Setting.value + $comment + $end)
                return ($lines -join '')
            }
            if ($section -eq $Setting.section) {
                $place = $last
            }
            $index = $last
        }
        $index++
    }
    $newline = "`n"
    if ($Text.Contains("`r`n") -or (-not $Text.Contains("`n"))) {
        $newline = "`r`n"
    }
    $count = $lines.Count
    if (($count -gt 0) -and (($place -lt 0) -or ($place -eq ($count - 1)))) {
        $final = $lines[$count - 1]
        $end = Get-LineEnd -Line $final
        if ($end -eq '') {
            $lines[$count - 1] = $final + $newline
        }
        # A backslash at the very end would take our line for its value's.
        $parts = Split-Value -Rest ($final.TrimEnd("`r", "`n"))
        $isComment = $final.Trim(' ', "`t").StartsWith('#')
        if ($parts.Continued -and (-not $isComment)) {
            $lines[$count - 1] = $lines[$count - 1] + $newline
        }
    }
    $line = $Setting.key + '=' + $Setting.value + $newline
    if ($place -ge 0) {
        $lines.Insert($place + 1, $line)
        return ($lines -join '')
    }
    $gap = ''
    if (($count -gt 0) -and ($lines[$count - 1].Trim() -ne '')) {
        $gap = $newline
    }
    return ($lines -join '') + $gap + '[' + $Setting.section + ']' + $newline + $line
}

function Merge-Settings {
    param([string]$Text, [object[]]$Settings)
    foreach ($setting in $Settings) {
        $Text = Set-Setting -Text $Text -Setting $setting
    }
    return $Text
}

# UTF-8 where it is that, else Latin-1, which keeps every byte; UTF-16 by its mark.
function Read-WslConfig {
    $path = Join-Path -Path $env:USERPROFILE -ChildPath '.wslconfig'
    if (-not (Test-Path -LiteralPath $path)) {
        return @{ Path = $path; Exists = $false; Mark = @(); Encoding = [Text.Encoding]::GetEncoding(65001); Text = '' }
    }
    $bytes = [IO.File]::ReadAllBytes($path)
    $mark = 0
    $encoding = New-Object -TypeName System.Text.UTF8Encoding -ArgumentList @($false, $true)
    if (($bytes.Length -ge 2) -and ($bytes[0] -eq 255) -and ($bytes[1] -eq 254)) {
        $mark = 2
        $encoding = New-Object -TypeName System.Text.UnicodeEncoding -ArgumentList @($false, $false)
    } elseif (($bytes.Length -ge 3) -and ($bytes[0] -eq 239) -and ($bytes[1] -eq 187) -and ($bytes[2] -eq 191)) {
        $mark = 3
    }
    try {
        $text = $encoding.GetString($bytes, $mark, $bytes.Length - $mark)
    } catch {
        $encoding = [Text.Encoding]::GetEncoding(28591)
        $text = $encoding.GetString($bytes, $mark, $bytes.Length - $mark)
    }
    $first = @()
    if ($mark -gt 0) {
        $first = $bytes[0..($mark - 1)]
    }
    return @{ Path = $path; Exists = $true; Mark = $first; Encoding = $encoding; Text = $text }
}

# ------------------------------------------------------------------ what is there

function Find-Wsl {
    $path = Join-Path -Path $env:ProgramFiles -ChildPath 'WSL\wsl.exe'
    if (Test-Path -LiteralPath $path) {
        return $path
    }
    return (Join-Path -Path $env:SystemRoot -ChildPath 'System32\wsl.exe')
}

# Its labels are translated, so only numbers are read. WSL_UTF8 keeps it from writing UTF-16, whose
# zero bytes an older one still sends.
function Get-WslVersion {
    param([string]$Wsl)
    if (-not $Wsl.StartsWith($env:ProgramFiles)) {
        return $null
    }
    $said = ((& $Wsl --version) -join ' ') -replace '\x00', ''
    $found = [regex]::Match($said, '\d+\.\d+\.\d+(\.\d+)?')
    if (-not $found.Success) {
        return $null
    }
    return $found.Value
}

function Get-Distros {
    $distros = @()
    $lxss = 'HKCU:\Software\Microsoft\Windows\CurrentVersion\Lxss'
    if (Test-Path -LiteralPath $lxss) {
        foreach ($key in @(Get-ChildItem -LiteralPath $lxss)) {
            $name = $key.GetValue('DistributionName')
            if ($name) {
                $distros += @{ name = $name; version = $key.GetValue('Version') }
            }
        }
    }
    return $distros
}

function Get-Rules {
    $rules = @()
    foreach ($rule in @(Get-NetFirewallHyperVRule -VMCreatorId $WslVm)) {
        if ($rule.Name -like 'Rackless-*') {
            $ports = @($rule.LocalPorts | Where-Object -FilterScript { $_ -and ($_ -ne 'Any') })
            $addresses = @($rule.RemoteAddresses) -replace '/(32|255\.255\.255\.255)$', ''
            $rules += @{ name = $rule.Name; addresses = @($addresses); ports = $ports }
        }
    }
    return $rules
}

function Get-Task {
    $task = Get-ScheduledTask -TaskName $TaskName -ErrorAction SilentlyContinue
    if (-not $task) {
        return $null
    }
    $kind = $task.Triggers[0].CimClass.CimClassName
    $start = $kind
    if ($kind -eq 'MSFT_TaskBootTrigger') {
        $start = 'boot'
    } elseif ($kind -eq 'MSFT_TaskLogonTrigger') {
        $start = 'logon'
    }
    $action = $task.Actions[0]
    $limit = $task.Settings.ExecutionTimeLimit
    return @{ start = $start; execute = $action.Execute; arguments = $action.Arguments; time_limit = $limit }
}

# The last two numbers are the settings on mains power and on battery; its labels are translated.
function Get-PowerTime {
    param([string]$Name)
    $said = (& powercfg.exe /query SCHEME_CURRENT SUB_SLEEP $Name) -join ' '
    $found = @([regex]::Matches($said, '0x[0-9a-fA-F]{8}'))
    if ($found.Count -lt 2) {
        return $null
    }
    return [Convert]::ToInt64($found[$found.Count - 2].Value, 16)
}

# Ports that Windows has set aside, in pairs; labels are translated, so only numbers are read.
function Get-ExcludedPorts {
    $ranges = @()
    foreach ($line in @(& netsh.exe int ipv4 show excludedportrange protocol=tcp)) {
        $found = [regex]::Match($line, '^\s*(\d+)\s+(\d+)\b')
        if ($found.Success) {
            $ranges += @{ first = [Convert]::ToInt64($found.Groups[1].Value, 10); last = [Convert]::ToInt64($found.Groups[2].Value, 10) }
        }
    }
    return $ranges
}

function Get-DynamicPorts {
    $numbers = @()
    foreach ($line in @(& netsh.exe int ipv4 show dynamicportrange tcp)) {
        $found = [regex]::Match($line, '(\d+)\s*$')
        if ($found.Success) {
            $numbers += [Convert]::ToInt64($found.Groups[1].Value, 10)
        }
    }
    if ($numbers.Count -ne 2) {
        return $null
    }
    return @{ first = $numbers[0]; last = $numbers[0] + $numbers[1] - 1 }
}

function Get-Agent {
    $service = Get-Service -Name 'ssh-agent' -ErrorAction SilentlyContinue
    if (-not $service) {
        return $null
    }
    return '{0}, {1}' -f $service.StartType, $service.Status
}

# The script for the distro is sent in base64, so that nothing in it has to be quoted.
function Invoke-Server {
    param([string]$Wsl, [string]$What)
    $key = '-'
    if ($Wanted.public_key) {
        $key = [Convert]::ToBase64String([Text.Encoding]::ASCII.GetBytes($Wanted.public_key))
    }
    $line = 'echo {0} | base64 -d | sh -s {1} {2} {3}' -f $ServerScript, $What, $Wanted.ssh_port, $key
    $said = @(& $Wsl -d $Wanted.distro --user root --exec sh -c $line)
    if ($LASTEXITCODE -ne 0) {
        throw ('{0} in {1} failed with exit code {2}' -f $What, $Wanted.distro, $LASTEXITCODE)
    }
    return $said
}

function Get-Lacking {
    param([string]$Wsl)
    try {
        $said = @(Invoke-Server -Wsl $Wsl -What 'state')
    } catch {
        return $null
    }
    $words = @($said | ForEach-Object -Process { $_.Trim() } | Where-Object -FilterScript { $_ })
    if (($words.Count -eq 0) -or ($words[$words.Count - 1] -ne 'end')) {
        return $null
    }
    return @{ Words = @($words | Where-Object -FilterScript { $_ -ne 'end' }) }
}

function Test-Distro {
    param($Known)
    foreach ($one in @($Known.distros)) {
        if ($one -and ($one.name -eq $Wanted.distro)) {
            return $true
        }
    }
    return $false
}

function Get-Facts {
    $wsl = Find-Wsl
    $config = Read-WslConfig
    $known = @{
        windows_build = [Environment]::OSVersion.Version.Build
        wsl_version = Get-WslVersion -Wsl $wsl
        wsl_path = $wsl
        distros = @(Get-Distros)
        wslconfig = $null
        has_hyperv_firewall = $false
        rules = $null
        task = Get-Task
        standby_s = Get-PowerTime -Name 'STANDBYIDLE'
        hibernate_s = Get-PowerTime -Name 'HIBERNATEIDLE'
        ssh_agent = Get-Agent
        excluded_ports = @(Get-ExcludedPorts)
        dynamic_ports = Get-DynamicPorts
        sshd_lacks = $null
    }
    if ($config.Exists) {
        $known.wslconfig = $config.Text
    }
    if (Get-Command -Name Get-NetFirewallHyperVRule -ErrorAction SilentlyContinue) {
        $known.has_hyperv_firewall = $true
        try {
            $known.rules = @(Get-Rules)
        } catch {
            $known.rules = $null
        }
    }
    if (Test-Distro -Known $known) {
        $lacking = Get-Lacking -Wsl $wsl
        if ($lacking) {
            $known.sshd_lacks = $lacking.Words
        }
    }
    return $known
}

# ------------------------------------------------------------------ the plan

function Show-Rules {
    param([object[]]$Rules)
    $lines = @()
    foreach ($rule in @($Rules)) {
        if ($rule) {
            $ports = 'all ports'
            $numbers = @($rule.ports | Where-Object -FilterScript { $_ } | Sort-Object -Unique)
            if ($numbers.Count -gt 0) {
                $ports = 'port ' + ($numbers -join ', ')
            }
            $addresses = @($rule.addresses | Sort-Object -Unique) -join ', '
            $lines += '{0}: TCP {1} from {2}' -f $rule.name, $ports, $addresses
        }
    }
    if ($lines.Count -eq 0) {
        return $NoRule
    }
    return (@($lines | Sort-Object) -join '; ')
}

function Show-Task {
    param($Task)
    if (-not $Task) {
        return $NoTask
    }
    return 'at {0}: {1} {2}; time limit {3}' -f $Task.start, $Task.execute, $Task.arguments, $Task.time_limit
}

function Show-Sleep {
    param($Known)
    $times = @()
    if ($Known.standby_s) {
        $times += 'sleeps after {0} s' -f $Known.standby_s
    }
    if ($Known.hibernate_s) {
        $times += 'hibernates after {0} s' -f $Known.hibernate_s
    }
    return ($times -join ', ')
}

function New-Change {
    param([string]$Id, $Before, [string]$After)
    foreach ($step in $Wanted.steps) {
        if ($step.id -eq $Id) {
            return [ordered]@{
                id = $Id
                title = $step.title
                explanation = $step.explanation
                before = $Before
                after = $After
                undo = $step.undo
                needs_admin = $step.needs_admin
            }
        }
    }
}

function Get-Settings {
    param($Known)
    if ($Known.windows_build -ge $Wanted.mirrored_build) {
        return $Wanted.settings.mirrored
    }
    return $Wanted.settings.older
}

function Get-WantedTask {
    param($Known)
    $arguments = '-d {0} --exec /bin/sleep infinity' -f $Wanted.distro
    return @{ start = $Wanted.start; execute = $Known.wsl_path; arguments = $arguments; time_limit = 'PT0S' }
}

function Get-Changes {
    param($Known)
    $changes = @()
    if (-not (Test-Distro -Known $Known)) {
        $before = $null
        if ($Known.wsl_version) {
            $before = 'WSL ' + $Known.wsl_version
        }
        $changes += New-Change -Id 'install' -Before $before -After ('WSL with ' + $Wanted.distro)
        return $changes
    }
    $text = ''
    if ($Known.wslconfig) {
        $text = $Known.wslconfig
    }
    $merged = Merge-Settings -Text $text -Settings (Get-Settings -Known $Known)
    if ($merged -cne $text) {
        $changes += New-Change -Id 'wslconfig' -Before $Known.wslconfig -After $merged
    }
    if ($Known.sshd_lacks) {
        $before = 'lacks ' + (@($Known.sshd_lacks) -join ', ')
        $after = 'SSH server on port {0}, keys only, started by systemd' -f $Wanted.ssh_port
        $changes += New-Change -Id 'sshd' -Before $before -After $after
    }
    $rules = @($Wanted.rules)
    if ($Known.has_hyperv_firewall -and ($rules.Count -gt 0)) {
        $before = $HiddenRules
        if ($null -ne $Known.rules) {
            $before = Show-Rules -Rules @($Known.rules)
        }
        $after = Show-Rules -Rules $rules
        if ($before -ne $after) {
            $changes += New-Change -Id 'firewall' -Before $before -After $after
        }
    }
    $before = Show-Task -Task $Known.task
    $after = Show-Task -Task (Get-WantedTask -Known $Known)
    if ($before -cne $after) {
        $changes += New-Change -Id 'keep-running' -Before $before -After $after
    }
    if ($Known.standby_s -or $Known.hibernate_s) {
        $before = Show-Sleep -Known $Known
        $changes += New-Change -Id 'sleep' -Before $before -After 'never sleeps or hibernates on mains power'
    }
    if ($Wanted.has_ssh_agent -and $Known.ssh_agent -and ($Known.ssh_agent -ne $AgentRuns)) {
        $changes += New-Change -Id 'ssh-agent' -Before $Known.ssh_agent -After $AgentRuns
    }
    return $changes
}

function Get-Problems {
    param($Known)
    $problems = @()
    if ($Known.windows_build -lt $Wanted.mirrored_build) {
        $problems += ('Windows build {0} has no mirrored networking, so this PC can train alone but not with others. Update to Windows 11 22H2 (build {1}) or newer.' -f $Known.windows_build, $Wanted.mirrored_build)
    } elseif (-not $Known.has_hyperv_firewall) {
        $problems += 'The Hyper-V firewall cannot be asked, so its rules are not changed. Update WSL: wsl --update'
    }
    if (-not (Test-Distro -Known $Known)) {
        return $problems
    }
    if (-not $Known.wsl_version) {
        $problems += 'WSL is the one that came with Windows, which ends when idle. Run: wsl --update'
    }
    foreach ($one in @($Known.distros)) {
        if (($one.name -eq $Wanted.distro) -and ($one.version -eq 1)) {
            $problems += ('{0} runs on WSL 1, which has no GPU. Run: wsl --set-version {0} 2' -f $Wanted.distro)
        }
    }
    if ($null -eq $Known.sshd_lacks) {
        $problems += ('{0} does not answer. Start it once from the Start menu, then try again.' -f $Wanted.distro)
    }
    foreach ($range in @($Known.excluded_ports)) {
        if ($range -and ($range.first -le $Wanted.ssh_port) -and ($Wanted.ssh_port -le $range.last)) {
            $problems += ('Windows has set port {0} aside for itself, so the SSH server cannot have it. Save this script again with another one: --port N' -f $Wanted.ssh_port)
        }
    }
    $dynamic = $Known.dynamic_ports
    if ($dynamic -and (($dynamic.last - $dynamic.first + 1) -lt $Wanted.least_dynamic_ports)) {
        $problems += ('Windows gives programs only the ports {0} to {1}, of which WSL takes a part; connections can fail. As administrator: netsh int ipv4 set dynamicport tcp start=49152 num=16384' -f $dynamic.first, $dynamic.last)
    }
    if (@($Wanted.rules).Count -eq 0) {
        $problems += 'No address of another PC is known, so the firewall is not changed. Add the other nodes, then save this script again.'
    }
    if ($Wanted.has_ssh_agent -and (-not $Known.ssh_agent)) {
        $problems += 'There is no ssh-agent. Add the optional feature OpenSSH Client in Settings.'
    }
    return $problems
}

# ------------------------------------------------------------------ the record, for -Undo

function Get-RecordPath {
    $folder = Join-Path -Path $env:LOCALAPPDATA -ChildPath 'Rackless'
    if (-not (Test-Path -LiteralPath $folder)) {
        [void](New-Item -ItemType Directory -Path $folder)
    }
    return (Join-Path -Path $folder -ChildPath ('windows-{0}.json' -f $Wanted.node))
}

function Read-Record {
    $path = Get-RecordPath
    if (-not (Test-Path -LiteralPath $path)) {
        return @()
    }
    $record = ConvertFrom-Json -InputObject ([IO.File]::ReadAllText($path))
    return @($record.changes)
}

function Save-Record {
    param([object[]]$Changes)
    $path = Get-RecordPath
    $text = ConvertTo-Json -InputObject @{ changes = @($Changes) } -Depth 6
    [IO.File]::WriteAllText($path + '.new', $text)
    Move-Item -LiteralPath ($path + '.new') -Destination $path -Force
}

# What was there before the first change counts: a second run must not overwrite it.
function Add-Record {
    param([string]$Id, $Before, $After)
    $changes = @()
    $known = $false
    foreach ($one in @(Read-Record)) {
        if ($one.id -eq $Id) {
            $known = $true
            $one.after = $After
        }
        $changes += $one
    }
    if (-not $known) {
        $changes += @{ id = $Id; before = $Before; after = $After }
    }
    Save-Record -Changes $changes
}

# ------------------------------------------------------------------ applying

function Test-Admin {
    $identity = [Security.Principal.WindowsIdentity]::GetCurrent()
    $principal = New-Object -TypeName Security.Principal.WindowsPrincipal -ArgumentList $identity
    return $principal.IsInRole([Security.Principal.WindowsBuiltInRole]::Administrator)
}

function Get-Base64 {
    param([string]$Path)
    if (-not (Test-Path -LiteralPath $Path)) {
        return $null
    }
    return [Convert]::ToBase64String([IO.File]::ReadAllBytes($Path))
}

function Write-WslConfig {
    param($Known)
    $config = Read-WslConfig
    $before = Get-Base64 -Path $config.Path
    if ($config.Exists) {
        $backup = '{0}.before-rackless-{1}' -f $config.Path, (Get-Date -Format 'yyyyMMdd-HHmmss')
        Copy-Item -LiteralPath $config.Path -Destination $backup
        Write-Host ('  backup: ' + $backup)
    }
    $text = Merge-Settings -Text $config.Text -Settings (Get-Settings -Known $Known)
    $bytes = @($config.Mark) + @($config.Encoding.GetBytes($text))
    $after = [Convert]::ToBase64String([byte[]]$bytes)
    Add-Record -Id 'wslconfig' -Before $before -After $after
    [IO.File]::WriteAllBytes($config.Path, [byte[]]$bytes)
}

function Set-Firewall {
    param([object[]]$Rules)
    Add-Record -Id 'firewall' -Before $null -After (Show-Rules -Rules $Rules)
    Remove-Rules
    foreach ($rule in @($Rules)) {
        if (@($rule.ports).Count -gt 0) {
            [void](New-NetFirewallHyperVRule -Name $rule.name -DisplayName $rule.name -Direction Inbound -VMCreatorId $WslVm -Protocol TCP -RemoteAddresses @($rule.addresses) -LocalPorts @($rule.ports) -Action Allow)
        } else {
            [void](New-NetFirewallHyperVRule -Name $rule.name -DisplayName $rule.name -Direction Inbound -VMCreatorId $WslVm -Protocol TCP -RemoteAddresses @($rule.addresses) -Action Allow)
        }
    }
}

function Remove-Rules {
    foreach ($rule in @(Get-Rules)) {
        Remove-NetFirewallHyperVRule -Name $rule.name
    }
}

function Register-Task {
    param($Known)
    $task = Get-WantedTask -Known $Known
    $user = '{0}\{1}' -f $env:USERDOMAIN, $env:USERNAME
    $action = New-ScheduledTaskAction -Execute $task.execute -Argument $task.arguments
    $never = New-TimeSpan -Seconds 0
    $minute = New-TimeSpan -Minutes 1
    $settings = New-ScheduledTaskSettingsSet -ExecutionTimeLimit $never -AllowStartIfOnBatteries -DontStopIfGoingOnBatteries -StartWhenAvailable -MultipleInstances IgnoreNew -RestartCount 99 -RestartInterval $minute
    Add-Record -Id 'keep-running' -Before $null -After (Show-Task -Task $task)
    if ($Wanted.start -eq 'logon') {
        $trigger = New-ScheduledTaskTrigger -AtLogOn -User $user
        $principal = New-ScheduledTaskPrincipal -UserId $user -LogonType Interactive -RunLevel Limited
        [void](Register-ScheduledTask -TaskName $TaskName -Action $action -Trigger $trigger -Settings $settings -Principal $principal -Force)
    } else {
        $trigger = New-ScheduledTaskTrigger -AtStartup
        $credential = Get-Credential -UserName $user -Message 'The password of this Windows account, so that WSL starts with Windows. Windows keeps it.'
        if (-not $credential) {
            throw 'no password was given. An account without one needs -AtLogon'
        }
        $plain = $credential.GetNetworkCredential().Password
        [void](Register-ScheduledTask -TaskName $TaskName -Action $action -Trigger $trigger -Settings $settings -User $credential.UserName -Password $plain -RunLevel Limited -Force)
    }
    Start-ScheduledTask -TaskName $TaskName
}

function Set-PowerTime {
    param([string]$Name, $Seconds)
    if ($null -eq $Seconds) {
        return
    }
    & powercfg.exe /setacvalueindex SCHEME_CURRENT SUB_SLEEP $Name $Seconds
    if ($LASTEXITCODE -ne 0) {
        throw ('powercfg refused to set {0}' -f $Name)
    }
    & powercfg.exe /setactive SCHEME_CURRENT
}

function Set-Sleep {
    param($Known)
    Add-Record -Id 'sleep' -Before @{ standby_s = $Known.standby_s; hibernate_s = $Known.hibernate_s } -After $null
    if ($Known.standby_s) {
        Set-PowerTime -Name 'STANDBYIDLE' -Seconds 0
    }
    if ($Known.hibernate_s) {
        Set-PowerTime -Name 'HIBERNATEIDLE' -Seconds 0
    }
}

function Start-Agent {
    param($Known)
    Add-Record -Id 'ssh-agent' -Before $Known.ssh_agent -After $AgentRuns
    Set-Service -Name 'ssh-agent' -StartupType Automatic
    Start-Service -Name 'ssh-agent'
}

function Invoke-Change {
    param([string]$Id, $Known)
    switch ($Id) {
        'install' {
            $wsl = $Known.wsl_path
            & $wsl --install -d $Wanted.distro
        }
        'wslconfig' { Write-WslConfig -Known $Known }
        'sshd' {
            Add-Record -Id 'sshd' -Before $null -After $Wanted.distro
            Invoke-Server -Wsl $Known.wsl_path -What 'apply' | Write-Host
        }
        'firewall' { Set-Firewall -Rules $Wanted.rules }
        'keep-running' { Register-Task -Known $Known }
        'sleep' { Set-Sleep -Known $Known }
        'ssh-agent' { Start-Agent -Known $Known }
    }
}

# ------------------------------------------------------------------ undoing

function Undo-WslConfig {
    param($Record)
    $path = Join-Path -Path $env:USERPROFILE -ChildPath '.wslconfig'
    $now = Get-Base64 -Path $path
    if ($now -ne $Record.after) {
        Write-Host ('  {0} was changed since, so it stays. Its earlier text is in the file beside it that ends in before-rackless.' -f $path)
        return
    }
    if ($null -eq $Record.before) {
        Remove-Item -LiteralPath $path
        return
    }
    [IO.File]::WriteAllBytes($path, [Convert]::FromBase64String($Record.before))
}

function Undo-Agent {
    param($Record)
    $start, $status = $Record.before -split ', '
    if ($status -ne 'Running') {
        Stop-Service -Name 'ssh-agent'
    }
    Set-Service -Name 'ssh-agent' -StartupType $start
}

function Undo-Change {
    param($Record)
    switch ($Record.id) {
        'wslconfig' { Undo-WslConfig -Record $Record }
        'sshd' { Invoke-Server -Wsl (Find-Wsl) -What 'undo' | Write-Host }
        'firewall' { Remove-Rules }
        'keep-running' {
            if (Get-Task) {
                Unregister-ScheduledTask -TaskName $TaskName -Confirm:$false
            }
        }
        'sleep' {
            Set-PowerTime -Name 'STANDBYIDLE' -Seconds $Record.before.standby_s
            Set-PowerTime -Name 'HIBERNATEIDLE' -Seconds $Record.before.hibernate_s
        }
        'ssh-agent' { Undo-Agent -Record $Record }
    }
}

function Test-NeedsAdmin {
    param([string]$Id)
    foreach ($step in $Wanted.steps) {
        if ($step.id -eq $Id) {
            return $step.needs_admin
        }
    }
    return $false
}

# ------------------------------------------------------------------ asking

function Confirm-Question {
    param([string]$Question)
    $answer = Read-Host -Prompt ($Question + ' [y/N]')
    return ($answer -match '^\s*(y|yes)\s*$')
}

function Show-Changes {
    param([object[]]$Changes)
    foreach ($change in @($Changes)) {
        $admin = ''
        if ($change.needs_admin) {
            $admin = ' (administrator)'
        }
        Write-Host ''
        Write-Host ($change.title + $admin)
        Write-Host ('  ' + $change.explanation)
        Write-Host ('  now:   ' + $change.before)
        Write-Host ('  then:  ' + $change.after)
        Write-Host ('  undo:  ' + $change.undo)
    }
}

# A run in WSL ends with it, so -Yes does not answer this.
function Restart-Wsl {
    param([string]$Wsl)
    $running = @(& $Wsl -d $Wanted.distro --exec pgrep -f 'agents[.]trainer')
    if ($running.Count -gt 0) {
        Write-Host 'WARNING: a run of Rackless trains in WSL now. Restarting WSL ends its part.'
    } else {
        Write-Host 'No run of Rackless trains in this WSL now. Other programs in WSL end, too.'
    }
    if (Confirm-Question -Question 'Restart WSL now (wsl --shutdown)?') {
        & $Wsl --shutdown
    } else {
        Write-Host 'The new .wslconfig counts once WSL has restarted: wsl --shutdown'
    }
}

# ------------------------------------------------------------------ main

$env:WSL_UTF8 = '1'

if ($Undo) {
    $left = @()
    $isAdmin = Test-Admin
    $changes = @(Read-Record)
    [array]::Reverse($changes)
    foreach ($record in $changes) {
        if ((Test-NeedsAdmin -Id $record.id) -and (-not $isAdmin)) {
            Write-Host ('{0}: needs an administrator' -f $record.id)
            $left = @($record) + $left
            continue
        }
        Write-Host ('Undoing {0}' -f $record.id)
        try {
            Undo-Change -Record $record
        } catch {
            Write-Host ('  could not be undone: {0}' -f $_)
            $left = @($record) + $left
        }
    }
    Save-Record -Changes $left
    if ($left.Count -gt 0) {
        Write-Host 'Some changes are left. Run this again with -Undo in a PowerShell that was started as administrator.'
        exit 1
    }
    Write-Host 'All changes of this script are undone. WSL forgets them once it restarts: wsl --shutdown'
    exit 0
}

if ($Facts) {
    if (-not $DryRun) {
        throw '-Facts is for -DryRun alone'
    }
    $known = ConvertFrom-Json -InputObject ([IO.File]::ReadAllText($Facts))
} else {
    $known = ConvertFrom-Json -InputObject (ConvertTo-Json -InputObject (Get-Facts) -Depth 6)
}
$changes = @(Get-Changes -Known $known)
$problems = @(Get-Problems -Known $known)

if ($DryRun) {
    ConvertTo-Json -InputObject ([ordered]@{ node = $Wanted.node; changes = $changes; problems = $problems }) -Depth 6
    exit 0
}

Write-Host ('Rackless: this PC as the node {0}' -f $Wanted.node)
foreach ($problem in $problems) {
    Write-Host ('Note: ' + $problem)
}
if ($changes.Count -eq 0) {
    Write-Host 'Nothing to do.'
    exit 0
}
Show-Changes -Changes $changes
Write-Host ''
$able = $changes
if (-not (Test-Admin)) {
    $able = @($changes | Where-Object -FilterScript { -not $_.needs_admin })
    if ($able.Count -lt $changes.Count) {
        Write-Host 'Those marked (administrator) need this script in a PowerShell that was started as administrator, with this same user.'
    }
}
if ($able.Count -eq 0) {
    exit 1
}
if (-not ($Yes -or (Confirm-Question -Question ('Make {0} of {1} changes?' -f $able.Count, $changes.Count)))) {
    Write-Host 'Nothing was changed.'
    exit 1
}
$failed = 0
foreach ($change in $able) {
    Write-Host $change.title
    try {
        Invoke-Change -Id $change.id -Known $known
    } catch {
        $failed++
        Write-Host ('  failed: {0}' -f $_)
    }
}
if (@($able | Where-Object -FilterScript { $_.id -eq 'wslconfig' }).Count -gt 0) {
    Restart-Wsl -Wsl $known.wsl_path
}
if (($failed -gt 0) -or ($able.Count -lt $changes.Count)) {
    Write-Host 'Not all is in place yet. Run this script again to see what is left; -Undo takes everything back.'
    exit 1
}
Write-Host 'Done. Restart Windows once, so that the task starts WSL before anyone logs on. -Undo takes everything back.'
exit 0
